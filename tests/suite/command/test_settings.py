"""Every setting attacked, from the schema and against it. A refusal is one line and leaves nothing."""

import math
import string
from functools import cache

import pytest
import yaml
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from suite.command.checking import names, shown
from suite.command.command_line import kind
from suite.command.configuration import _NOT_IDENTITY, digest
from suite.command.errors import ConfigurationError
from suite.command.explaining import explain
from suite.command.schema import Group
from suite.reading.stored import as_yaml, read_settings
from tests.suite.conftest import ROOT, set_anew
from tests.suite.refusing import assert_refused

KINDS = {p.parent.name: p.parent.name for p in (ROOT / "experiments").glob("*/__init__.py")}
KINDS["training"] = "split_conv"  # kind -> an experiment of it
ATTACKS = (
    *("null", "true", "no", "0", "-1", "1", "2.5", "1e400", "nan", "-inf", "99999999999999999999"),
    *("[]", "[[0]]", "[1,1]", "[null]", "{}", "{a:1}", "{1:2}", "abc", "''", "'../evil'", "'/abs'", "'~/x'"),
    *("'ü'", "'\\u202e'", "'a.b'", "'a b'", "${oc.env:HOME}", "${name}", "${nothing}", "'a\tb'", "'???'"),
)
quick = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@cache
def known(kind_name: str) -> list[str]:
    # a seed is read before anything else (test_seeds), a kind is another schema, a device another machine
    left_out = ("seed", "kind", "device", "networks.activation", "networks.pool")
    return [name for name in names(kind(kind_name).Settings) if name not in left_out]


@st.composite
def attacks(draw) -> tuple[str, str, str]:
    kind_name = draw(st.sampled_from(sorted(KINDS)))
    words = st.text(string.printable + "äß€\x00", max_size=8).map(lambda t: '"' + t.replace('"', "") + '"')
    values = st.sampled_from(ATTACKS) | st.integers().map(str) | st.floats().map(repr) | words
    return KINDS[kind_name], draw(st.sampled_from(known(kind_name))), draw(values)


def attempt(experiment: str, override: str) -> tuple[DictConfig | None, Exception | None]:
    try:
        return set_anew(experiment, override), None
    except Exception as error:
        return None, error


@quick
@given(attacks())
@example(("control", "hypothesis", "${oc.env:HOME}"))
def test_whatever_is_written_is_taken_or_refused_in_one_line(tmp_path_factory, attack):
    experiment, name, value = attack
    assume("\\" not in value)
    found, refusal = attempt(experiment, f"++{name}={value}")
    if refusal is not None:
        line = explain(refusal)
        assert line, repr(refusal)
        assert line.isprintable()
        return
    folder = tmp_path_factory.mktemp("stored")
    (folder / "experiment.yaml").write_text(as_yaml(found), encoding="utf-8")
    kept = read_settings(folder)  # what was taken can be kept, and read
    assert digest(found) == digest(OmegaConf.merge(kept, {"results": "", "workers": 1}))


def leaves(schema: type[Group], prefix: str = ""):
    """Of every setting that has a type of its own its name and that type."""
    for name, field in schema.model_fields.items():
        if name == "scale":  # what an experiment means by it comes after what is composed here
            continue
        if isinstance(field.annotation, type) and issubclass(field.annotation, Group):
            yield from leaves(field.annotation, f"{prefix}{name}.")
        elif field.annotation in (int, float, bool):
            yield prefix + name, field


def right(field) -> st.SearchStrategy:
    if field.annotation is bool:
        return st.booleans()
    low = next((m.ge for m in field.metadata if hasattr(m, "ge")), None)
    high = next((m.le for m in field.metadata if hasattr(m, "le")), None)
    if field.annotation is int:
        return st.integers(low, high)
    least = math.ulp(0.0) if low is None else low
    return st.floats(least, high, allow_nan=False, allow_infinity=False)


def wrong(field) -> st.SearchStrategy:
    """Values of the type, out of its range, and of other types."""
    others = st.sampled_from(["abc", "no", None, [], {"a": 1}, math.nan, math.inf])
    if field.annotation is bool:
        return others | st.integers()
    low = next((m.ge for m in field.metadata if hasattr(m, "ge")), 0)
    return others | st.integers(max_value=low - 1) | st.booleans() | st.floats(max_value=low - 0.5)


@st.composite
def drawn(draw, values) -> tuple[str, str, object]:
    kind_name = draw(st.sampled_from(sorted(KINDS)))
    name, field = draw(st.sampled_from(list(leaves(kind(kind_name).Settings))))
    return KINDS[kind_name], name, draw(values(field))


@quick
@given(drawn(wrong))
def test_what_is_out_of_its_range_is_refused_by_its_name(attack):
    experiment, name, value = attack
    with pytest.raises(ConfigurationError) as error:
        set_anew(experiment, f"++{name}={shown(value)}")
    assert str(error.value).startswith(f"{name}=")


@quick
@given(drawn(right))
def test_what_is_in_its_range_is_taken_and_does_something(chosen):
    experiment, name, value = chosen
    # at most `steps`; none on a CPU; of auto; a share below 1; of logger=wandb alone
    assume(name not in ("float64_steps", "tf32", "float64_share", "local.share", "logger.patience"))
    before = set_anew(experiment)
    found = set_anew(experiment, f"++{name}={shown(value)}")
    assert OmegaConf.select(found, name) == value
    told_apart = OmegaConf.select(before, name) != value and name.split(".")[0] not in _NOT_IDENTITY
    if name != "data.time_limit":
        assert (digest(found) != digest(before)) == told_apart


REFUSED = {
    "rerun=no": "rerun=no must be true or false",
    "tf32=null": "tf32=null must be true or false",
    "optimizer.momentum=5": "optimizer.momentum=5 must be a number from 0 to 1",
    "optimizer.lr=nan": "optimizer.lr=nan must be a finite number",
    "expected=nope": "expected=nope is unknown: choose from bit_identical,",
    "dtypes=[float32,float32]": "dtypes=[float32, float32] names one of them twice",
    "dtypes=null": "dtypes=null must be a list",
    "roles=3": "roles=3 must be a list: write roles=[3]",
    "probe_images=-1": "probe_images=-1 must be a whole number of at least 1",
    "seeds.order=-1": "seeds.order=-1 must be a whole number from 0 to 4294967295",
    "name=1": "name=1 must be text: write 'name=\"1\"'",
    "name=../evil": "name=../evil must be the name of one folder",
    "name=/abs": "name=/abs must be the name of one folder",
    "name=-rf": "name=-rf must be the name of one folder",
    "name='a:b*?'": "name=a:b*? must be the name of one folder",
    "name='a\nb'": "must be the name of one folder",
    "results=3": "results=3 must be text",
    "rewrite=null": "rewrite=null must hold target, options",
    "log_schedule=abc": "log_schedule=abc must hold dense, per_decade",
    "steps=99999999999999999999": "must be at most 1000000000",
    "threads=1000000": "threads=1000000 must be auto, null or a whole number from 1 to 1024",
    "hypothesis=${oc.env:HOME}": "reads the surroundings of a run",
    'hypothesis="${oc.${name}:HOME}"': "reads the surroundings of a run",
    "~steps": "steps is not set: write steps=VALUE",
    "+log_schedule.dens=3": "did you mean log_schedule.dense?",
    "+data.foot=1": "did you mean data.root?",
    "data.root=/images": "makes no use of root: leave it out",
    "+logger.project=mine": "makes no use of project: leave it out",
    "+losses=torch.nn.functional.no_such": "losses is no setting",
    "clip=0": "clip=0 must be a finite number above 0",
    "+scheduler.step_size=3": "has step_size and no scheduler: write scheduler._target_=CLASS",
}


@pytest.mark.parametrize("override", REFUSED)
def test_a_line_says_what_is_wrong_and_what_to_write(override):
    with pytest.raises(ConfigurationError) as error:
        set_anew("split_conv", override)
    assert REFUSED[override] in str(error.value)


ON_THE_COMMAND_LINE = {
    "an option": ("+rewrite.options.prats=2", "prats is no argument of split_conv: did you mean parts?"),
    "an option of another type": ("rewrite.options.parts=two", "rewrite.options.parts=two does not fit"),
    "what the model does not take": (
        "+model.widht=3",
        "model.widht is no argument of ResNet18: did you mean width?",
    ),
    "what the data set decides": ("+model.classes=3", "model.classes is no argument of ResNet18"),
    "what the optimizer does not take": ("+optimizer.nestorov=true", "did you mean nesterov?"),
    "a word for true": ("+optimizer.nesterov=no", "SGD takes nesterov: bool"),
    "a size": ("+scale.nonsense=3", "scale.nonsense is no setting"),
    "an umlaut": ("results=ü", "write it in quotes: 'results=\"ü\"'"),
    "an equals sign": ("hypothesis=a=b", "write it in quotes: 'hypothesis=\"a=b\"'"),
    "a tilde": ("results=~/x", "write results=$HOME/x"),
    "a list of lists": ("seed=[[0]]", "holds a list in a list"),
    "a seed too large": ("seed=4294967296", "seed=4294967296 is above 4294967295"),
    "more than a batch": ("batch_size=1000000", "the number of training images"),
    "a rewrite of nobody": (
        "rewrite.options.parts=2 roles=[reference,control] subject=control",
        "rewrite.target makes the candidate",
    ),
    "an option of nobody's": (
        "+rewrite.options.prats=2 roles=[reference,control] subject=control",
        "rewrite.target makes the candidate",
    ),
    "of another logger": ("logger.project=x", "logger.project is no setting: it is one of logger=wandb"),
    "a logger without its project": ("logger.name=wandb", "names no project: write logger=wandb"),
    "what the optimizer may take": ("optimizer.nesterov=true", "write +optimizer.nesterov=true"),
    "text in a resolver": (r'hypothesis="${oc.decode:\"${oc.env:HOME}\"}"', "a setting cannot be read"),
    "a word for jobs": (
        "-m hydra/launcher=joblib hydra.launcher.n_jobs=abc",
        "hydra.launcher.n_jobs=abc must be a whole number of at least 1",
    ),
    "batches of no job": (
        "-m hydra.sweeper.max_batch_size=-1",
        "hydra.sweeper.max_batch_size=-1 must be a whole number of at least 1",
    ),
    "every job of a sweep": ("-m optimizer.lr=-1", "optimizer.lr=-1"),
    "no job of a sweep": ("-m model=nope", "model=nope"),
    "jobs and their settings": ("-m --cfg job", "leave -m out"),
    "settings of nothing": ("--cfg foo", "--cfg foo: --cfg is followed by job or hydra or all"),
    "an option without its word": ("--package=", "--package: --package is followed by a word"),
}


@pytest.mark.parametrize("case", ON_THE_COMMAND_LINE)
def test_a_refusal_leaves_nothing(train, tmp_path, case):
    override, message = ON_THE_COMMAND_LINE[case]
    assert_refused(train("+experiment=split_conv", *override.split()), message, tmp_path)


def test_an_experiments_own_options_stay_behind_with_its_rewrite(train):
    own = "rewrite.target=models.rewrites.channels_last.channels_last"
    done = train("+experiment=split_conv", own, "--cfg", "job", "--resolve")
    assert done.status == 0
    done = train("+experiment=split_conv", own, "+rewrite.options.match=fc")
    assert "rewrite.options.match is no argument of channels_last: it takes none" in done.errors[0]


@pytest.mark.parametrize("name", ["kinks", "split_conv"])
def test_the_resolved_settings_can_be_shown(train, tmp_path, name):
    """Those of kinks rest on what it means by a scale."""
    done = train(f"+experiment={name}", "--cfg", "job", "--resolve")
    assert (done.status, done.err) == (0, "")
    assert yaml.safe_load(done.out)["steps"] > 0
    assert "${" not in done.out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind_name", sorted(KINDS))
def test_a_key_that_nothing_reads_is_refused_at_any_depth(kind_name):
    groups = {n.rpartition(".")[0] for n in known(kind_name)} - {"scale"}
    groups -= {"model", "optimizer", "loss", "scheduler"}  # held to what they name
    for group in groups:
        name = f"{group}.nonsense".lstrip(".")
        if "networks" not in name:
            with pytest.raises(ConfigurationError, match=f"{name} is no setting"):
                set_anew(KINDS[kind_name], f"+{name}=1")
