"""``float64_steps=auto``: a number that fits the machine, chosen once an experiment."""

import io
import json
import threading
from pathlib import Path

import pytest
from rich.console import Console

from suite.command.configuration import composed, digest, resolve
from suite.command.errors import ConfigurationError
from suite.reading.stored import read_settings
from suite.running.costs import Cost, Sketch, float64_choice, forecast, training_seconds
from suite.running.experiment_folder import open_experiment
from suite.running.float64_steps import NUMBER, as_begun
from suite.showing.terminal import Terminal

QUIET = Terminal(Console(file=io.StringIO()))


def configured(*overrides, experiment="split_conv"):
    asked = [f"+experiment={experiment}", "device=cpu", "logger=none", "workers=1", *overrides]
    return resolve(composed(*asked))


@pytest.fixture
def full(tmp_path):
    return lambda *more, **named: configured("scale=full", f"results={tmp_path}", *more, **named)


def sketch(narrow, wide, evaluation=0.0):
    costs = {"float32": Cost(narrow, 0.0, evaluation), "float64": Cost(wide, 0.0, evaluation)}
    return Sketch(("reference.float64",), 1, "a GPU", costs)


@pytest.mark.parametrize(
    ("slower", "steps"), [(1, 3900), (2, 1949), (64, 59), (300, 20)], ids=["as fast", "H100", "4090", "least"]
)
def test_float64_takes_its_share_and_never_fewer_steps_than_at_small(full, slower, steps):
    choice = float64_choice(full(), sketch(0.01, 0.01 * slower))
    assert choice["float64_steps"] == steps
    assert configured("scale=small").float64_steps == choice["least"] == 20


def test_a_larger_share_takes_more_and_evaluations_are_paid_from_it(full):
    def steps(*more, evaluation=0.0):
        return float64_choice(full(*more), sketch(0.01, 0.1, evaluation))["float64_steps"]

    assert steps("float64_share=0.2") < steps() < steps("float64_share=0.8")
    whole = full()
    costs = sketch(0.01, 0.1, evaluation=2.0).costs
    took = [
        training_seconds(whole, costs["float64"], steps(evaluation=2.0)),
        training_seconds(whole, costs["float32"], 3900),
    ]
    assert 0.48 <= took[0] / sum(took) <= 0.5


def test_an_experiment_of_its_own_sizes_keeps_what_it_has_at_small(full):
    own = full(experiment="lockstep_curves")
    assert float64_choice(own, sketch(0.01, 10.0))["float64_steps"] == 391
    assert float64_choice(full("steps=12"), sketch(0.01, 10.0))["float64_steps"] == 12


def test_what_is_asked_for_wins_and_small_is_as_it_was(full):
    assert full("float64_steps=7").float64_steps == 7
    assert configured("scale=small").float64_steps == 20
    assert configured("scale=smoke").float64_steps == 3
    assert full(experiment="loss_curves_do_not_tell").float64_steps == 3900  # a question has its own answer


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["scale=full", "float64_share=1"], "must be a number above 0 and below 1"),
        (["scale=full", "float64_steps=many"], "float64_steps=many must be auto or a whole number"),
    ],
)
def test_what_means_nothing_is_refused(given, said):
    with pytest.raises(ConfigurationError, match=said):
        configured(*given)


def test_digests_of_numbers_are_those_of_before_there_was_auto(full):
    assert digest(full("float64_steps=3900")) == "e056716d18"
    assert digest(configured("scale=small")) == "d99c7adf7c"
    assert digest(full()) not in ("e056716d18", digest(full("float64_share=0.4")))


def test_an_experiment_that_was_begun_with_all_of_them_goes_on_so(full, tmp_path):
    said = []
    assert as_begun(full(), said.append) == full()
    before = open_experiment(full("float64_steps=3900"), None, QUIET)
    after = as_begun(full(), said.append)
    assert after.float64_steps == 3900
    assert digest(after) == before.digest
    assert said == [f"float64_steps=3900: so this experiment was begun in {before.folder}"]
    assert as_begun(full("float64_steps=5"), said.append).float64_steps == 5


def choice(steps):
    return {"float64_steps": steps, "why": f"because {steps}"}


def test_who_comes_first_chooses_for_all(full):
    first = NUMBER.settle(open_experiment(full(), None, QUIET), choice(70))
    assert first.settings.float64_steps == 70
    second = NUMBER.settle(open_experiment(full(), None, QUIET), choice(900))
    later = open_experiment(full(), None, QUIET)
    for experiment in (first, second, later):
        assert experiment.settings.float64_steps == 70
        assert experiment.choice == choice(70)
        assert experiment.digest == first.digest == digest(full())
    assert read_settings(first.folder).float64_steps == 70


def test_of_many_machines_at_once_one_chooses(full):
    together, settled, settings = threading.Barrier(12, timeout=60), [], full()

    def machine(number):
        experiment = open_experiment(settings, None, QUIET)
        together.wait()
        settled.append(NUMBER.settle(experiment, choice(number)))

    machines = [threading.Thread(target=machine, args=[50 + n]) for n in range(12)]
    for thread in machines:
        thread.start()
    for thread in machines:
        thread.join()
    assert len(settled) == 12
    assert len({e.settings.float64_steps for e in settled}) == 1
    folder = settled[0].folder
    assert sorted(p.name for p in folder.iterdir()) == ["experiment.yaml", "float64_steps"]


@pytest.mark.parametrize("damaged", ["{", '{"float64_steps": 0}', '{"float64_steps": 9, "seal": "no"}', "{}"])
def test_a_damaged_choice_is_one_line(full, damaged):
    experiment = NUMBER.settle(open_experiment(full(), None, QUIET), choice(70))
    file = experiment.folder / "float64_steps" / "chosen.json"
    file.write_text(damaged)
    with pytest.raises(ConfigurationError, match=r"chosen\.json") as error:
        open_experiment(full(), None, QUIET)
    assert "write results=FOLDER" in str(error.value)


def test_the_forecast_counts_every_evaluation_the_probes_and_the_start(full):
    settings = full("float64_steps=20", "log_schedule.dense=1")
    steps = forecast(settings, sketch(0.01, 0.1), [0], workers=1)
    assert steps >= 3900 * 0.01 + 20 * 0.1
    evaluated = forecast(settings, sketch(0.01, 0.1, evaluation=5.0), [0], workers=1)
    assert evaluated - steps == pytest.approx(5.0 * (10 + 1))  # ten in float32, one at the end of float64
    probed = Sketch((), 1, "a GPU", sketch(0.01, 0.1).costs, probes=30.0)
    assert forecast(settings, probed, [0], workers=1) - steps == pytest.approx(30.0)
    assert forecast(settings, probed, [3000], workers=1) < steps / 2  # what is done is not done again
    both = forecast(settings, probed, [0, 0, 0], workers=2)
    assert both == pytest.approx(forecast(settings, probed, [0, 0], workers=1), rel=0.1)


def test_a_seed_says_what_was_chosen_and_the_next_one_takes_it(judged, tmp_path, capsys):
    tiny = ["dtypes=[float32,float64]", "steps=3", "batch_size=4", "eval_images=4", "workers=1", "threads=1"]
    command = ["+experiment=control", "float64_steps=auto", *tiny]
    judged(*command, "seed=0")
    (file,) = Path(tmp_path).rglob("float64_steps/chosen.json")
    chosen = json.loads(file.read_text())
    assert "float64" in " ".join(capsys.readouterr().out.split())
    judged(*command, "seed=1", "float64_share=0.5")
    runs = [json.loads(f.read_text()) for f in sorted(Path(tmp_path).rglob("run.json"))]
    assert len(runs) == 2
    for run in runs:
        assert run["float64_steps"]["why"] == chosen["why"]
        assert run["arms"]["reference.float64"]["horizon"] == chosen["float64_steps"]
