import pytest


@pytest.fixture(autouse=True)
def few_updates(monkeypatch):
    """The probe of the optimizers takes half of a test here, and its fiftieth update is as its fifth."""
    monkeypatch.setattr("driftlab.probes.update.STEPS", 5)
