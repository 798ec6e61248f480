"""A part that is not installed says what to install; a mistake of our own is not taken for one."""

import importlib

import pytest

from driftlab.extras import extra

INSTEAD = "no_such_library is not installed: pip install 'driftlab[report]'"


@pytest.mark.parametrize(
    ("imported", "later", "said"),
    [
        ("no_such_library", "sys", INSTEAD),
        ("sys", "no_such_library", INSTEAD),
        ("driftlab.no_such_module", "sys", "No module named 'driftlab.no_such_module'"),
    ],
)
def test_what_is_missing_is_one_line(imported, later, said):
    with pytest.raises(ModuleNotFoundError) as raised, extra("report", later):
        importlib.import_module(imported)
    assert str(raised.value) == said
