"""Runs of one experiment are told by what differs, wherever they are listed."""

from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from driftlab.record.seed_record import read_json
from suite.command.naming import in_a_file_name, title
from tests.suite.conftest import resolved

SHORT = ("dtypes=[float32]", "steps=2", "local.windows=[]", "seed=0")


def test_a_sweep_is_listed_by_what_its_jobs_change(train, tmp_path):
    sweep = ("-m", "+experiment=split_conv", "rewrite.options.parts=2,4", *SHORT)
    ended = train(*sweep)
    assert ended.status == 0, ended.err
    words = "data=shapes dtypes=[float32] local.windows=[] {} scale=smoke steps=2"
    said = " ".join(ended.out.split())
    assert all(words.format(f"parts={n}") in said for n in (2, 4))
    names = sorted(path.name.partition(".")[2] for path in tmp_path.glob("split_conv/*.*"))
    assert names == [
        f"data=shapes,dtypes=float32,local.windows=,parts={n},scale=smoke,steps=2" for n in (2, 4)
    ]
    for listed in tmp_path.glob("split_conv/*.*"):
        folder = listed.with_name(listed.name.partition(".")[0])
        assert f"parts={listed.name.partition('parts=')[2][0]}" in (folder / "report.html").read_text()
        assert read_json(folder / "verdict.json")["digest"] == folder.name


def test_it_may_be_given_and_leaves_the_digest_alone(train, tmp_path):
    for label in ("first", "second"):
        ended = train("+experiment=split_conv", *SHORT, f"label={label} try")
        assert ended.status == 0, ended.err
        assert f"split_conv {label} try" in ended.out
    (listed,) = tmp_path.glob("split_conv/*.*")
    assert listed.name.endswith(".second,try")
    refused = train("+experiment=split_conv", *SHORT, "label=-x")
    assert (refused.status, len(refused.errors)) == (2, 1)
    assert "label=-x" in refused.err


def test_a_run_that_changes_nothing_or_is_older_has_its_name_alone():
    assert title(resolved("split_conv")) == "split_conv"
    assert title(OmegaConf.create({"name": "split_conv"})) == "split_conv"


@given(st.text(max_size=30))
def test_a_file_name_holds_nothing_that_a_disk_or_a_shell_reads(text):
    assert not set(in_a_file_name(text)) & set("/\\ \0\n*?$'\"`;|&<>()[]{}~")
