"""The parts of driftlab that are installed by name: ``pip install 'driftlab[report]'``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec


@contextmanager
def extra(name: str, *later: str) -> Iterator[None]:
    """Stands around the imports of the part ``name``.

    Args:
        later: modules that the part imports when it uses them, and that have to be there all the same.

    Raises:
        ModuleNotFoundError: one of its libraries is missing: which, and what to install.
    """
    try:
        yield
        for module in later:
            if find_spec(module) is None:
                raise ModuleNotFoundError(name=module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "driftlab":  # our own mistake
            raise
        message = f"{error.name} is not installed: pip install 'driftlab[{name}]'"
        raise ModuleNotFoundError(message, name=error.name) from None
