"""Probes off the training's path: one seed is asked, the others take its answer, whatever happens to it."""

import threading
import time
from dataclasses import replace

import pytest

from driftlab.probes.probe import Probe
from driftlab.probes.update import PROBE as UPDATE
from driftlab.words import Verdict
from suite.running import asked_once as module
from suite.running.asked_once import asked_once, checked

HERE = {"environment": {"device": "here"}, "instruments": "today"}
THERE = {"environment": {"device": "there"}, "instruments": "today"}


class Asked:
    """A probe that counts how often it is asked, and answers with that."""

    def __init__(self, answer=lambda probe, times: probe.finding(float(times), Verdict.ROUND_OFF, "asked")):
        self.times, self.answer = 0, answer
        self.probe: Probe = replace(UPDATE, ask=self.ask)

    def ask(self, found):
        self.times += 1
        return [self.answer(self.probe, self.times)]

    def of(self, folder, seed, made_by=HERE):
        (finding,) = asked_once(self.probe, folder, f"seed={seed}", made_by).ask(None)
        return finding


def test_the_first_is_asked_and_the_others_take_its_answer(tmp_path):
    asked = Asked()
    first, second = asked.of(tmp_path, 3), asked.of(tmp_path, 5)
    assert first == second
    assert asked.times == 1
    assert first.evidence.reading == "asked; asked once, of seed 3"
    assert (first.evidence.measured, first.evidence.supports) == (1.0, Verdict.ROUND_OFF)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["probes"]  # nobody owns anything any more


@pytest.mark.parametrize("made_by", [THERE, HERE | {"instruments": "tomorrow"}])
def test_where_kernels_or_probes_are_others_it_is_asked_again(tmp_path, made_by):
    asked = Asked()
    asked.of(tmp_path, 0)
    assert asked.of(tmp_path, 1, made_by).evidence.measured == 2.0


def test_a_damaged_answer_is_asked_for_again(tmp_path):
    asked = Asked()
    asked.of(tmp_path, 0)
    stored = tmp_path / "probes" / "update.json"
    stored.write_text(stored.read_text().replace("1.0", "7.0"))
    assert asked.of(tmp_path, 1).evidence.measured == 2.0
    assert checked(stored)["asked_of"] == "seed=1"


@pytest.mark.parametrize(
    "answer",
    [
        lambda probe, times: probe.not_applicable("this one draws random numbers"),
        lambda probe, times: probe.refused(ValueError("no")),
        lambda probe, times: probe.failed(NameError("no")),
    ],
)
def test_what_is_no_answer_is_of_that_seed_alone(tmp_path, answer):
    asked = Asked(answer)
    first, second = asked.of(tmp_path, 0), asked.of(tmp_path, 1)
    assert asked.times == 2
    assert first == second
    assert "asked once" not in first.evidence.reading


def test_what_is_raised_is_raised_and_holds_nobody_up(tmp_path):
    def raising(probe, times):
        if times == 1:
            raise RuntimeError("the pair's own")
        return probe.finding(float(times), None, "asked")

    asked = Asked(raising)
    with pytest.raises(RuntimeError, match="the pair's own"):
        asked.of(tmp_path, 0)
    assert asked.of(tmp_path, 1).evidence.measured == 2.0


def together(asked, folder, seeds):
    found = {}
    threads = [
        threading.Thread(target=lambda s=s: found.update({s: asked.of(folder, s)})) for s in range(seeds)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def slow(probe, times):
    time.sleep(0.5)
    return probe.finding(float(times), None, "asked")


def test_who_comes_meanwhile_waits(tmp_path):
    asked = Asked(slow)
    found = together(asked, tmp_path, 4)
    assert asked.times == 1
    assert {finding.evidence.measured for finding in found.values()} == {1.0}


def test_nobody_waits_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LONGEST_WAIT", 0.0)
    asked = Asked(slow)
    assert len(together(asked, tmp_path, 2)) == 2
    assert asked.times == 2


def test_a_folder_that_cannot_be_written_costs_nothing_but_the_sharing(tmp_path):
    asked, folder = Asked(), tmp_path / "a file"
    folder.write_text("")
    assert [asked.of(folder, seed).evidence.measured for seed in (0, 1)] == [1.0, 2.0]
