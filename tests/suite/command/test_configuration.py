"""Settings resolved on this machine: what an experiment means by a scale, and what a device cannot do."""

import pytest
import torch

from suite.command.configuration import composed, digest, resolve
from suite.command.errors import ConfigurationError


@pytest.fixture
def settings():
    def compose_and_resolve(*overrides: str):
        return resolve(composed("+experiment=lockstep_curves", "device=cpu", *overrides))

    return compose_and_resolve


def test_sizes_of_an_experiment_replace_those_of_the_scale(settings):
    own = settings("scale=small", "~sizes", "+sizes={small:{steps:77},smoke:{}}")
    assert (own.steps, own.scale.steps, own.batch_size) == (77, 77, 64)
    assert "sizes" not in own


def test_what_is_asked_for_wins_over_sizes(settings):
    assert settings("scale=small", "steps=5").steps == 5


def test_another_size_is_another_experiment_and_the_same_one_is_not(settings):
    by_sizes = [
        digest(settings("scale=small", "~sizes", f"+sizes={{small:{{steps:{n}}}}}")) for n in (7, 8, 7)
    ]
    assert by_sizes[0] == by_sizes[2] != by_sizes[1]
    asked = [digest(settings("scale=small", f"question={q}")) for q in ("a", "b")]
    assert asked[0] == asked[1]


def test_a_scale_without_a_size_is_one_clear_line(settings):
    with pytest.raises(ConfigurationError) as error:
        settings("scale=full", "~sizes", "+sizes={small:{},smoke:{}}")
    assert str(error.value) == "scale=full: lockstep_curves has sizes for small, smoke"


def test_tf32_is_refused_where_there_is_none(settings):
    with pytest.raises(ConfigurationError, match="a CPU has no TF32"):
        settings("tf32=true")


def test_auto_takes_the_size_of_the_machine(settings, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert settings("scale=auto").steps == settings("scale=small").steps
