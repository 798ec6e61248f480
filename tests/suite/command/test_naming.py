"""Runs of one experiment are told by what differs, wherever they are listed."""

from omegaconf import OmegaConf

from suite.command.written import title
from tests.suite.conftest import resolved

SHORT = ("dtypes=[float32]", "steps=2", "local.windows=[]", "seed=0")


def test_a_sweep_is_listed_by_what_its_jobs_change(train, tmp_path):
    sweep = ("-m", "+experiment=split_conv", "rewrite.options.parts=2,4", *SHORT)
    ended = train(*sweep)
    assert ended.status == 0, ended.err
    words = "{} data=shapes dtypes=[float32] local.windows=[] model=one_block scale=smoke steps=2"
    said = " ".join(ended.out.split())
    assert all(words.format(f"parts={n}") in said for n in (2, 4))
    listed = (tmp_path / "split_conv.txt").read_text().splitlines()
    assert len(listed) == 2
    for number, line in zip(
        (2, 4), sorted(listed, key=lambda line: line.partition("parts=")[2]), strict=True
    ):
        digest, label, command = line.split("  ")
        assert label == words.format(f"parts={number}")
        assert f"rewrite.options.parts={number}" in command
        assert f"parts={number}" in (tmp_path / "split_conv" / digest / "report.html").read_text()


def test_it_may_be_given_and_leaves_the_digest_alone(train, tmp_path):
    for label in ("first", "second"):
        ended = train("+experiment=split_conv", *SHORT, f"label={label} try")
        assert ended.status == 0, ended.err
        assert f"split_conv {label} try" in ended.out
    ((first, one, _), (second, other, _)) = (
        line.split("  ") for line in (tmp_path / "split_conv.txt").read_text().splitlines()
    )
    assert (first, one, other) == (second, "first try", "second try")
    refused = train("+experiment=split_conv", *SHORT, "label=-x")
    assert (refused.status, len(refused.errors)) == (2, 1)
    assert "label=-x" in refused.err


def test_a_run_that_changes_nothing_or_is_older_has_its_name_alone():
    assert title(resolved("split_conv")) == "split_conv"
    assert title(OmegaConf.create({"name": "split_conv"})) == "split_conv"
