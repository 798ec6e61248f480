"""The tests that need a GPU (pytest.mark.gpu), by name."""

from __future__ import annotations

from xml.etree import ElementTree

from scripts.gpu_parts.part import ROOT, Check, Found, Items, Part


def items(check: Check) -> Items:
    return {"pytest -m gpu": run}


def run(check: Check) -> Found:
    import pytest

    report = check.results / "tests.xml"
    report.unlink(missing_ok=True)
    # the files alone that hold such tests: the others would be imported for nothing
    files = [str(f) for f in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in f.read_text()]
    status = pytest.main(["-m", "gpu", "-n", "0", "-p", "no:cacheprovider", f"--junitxml={report}", *files])
    if not report.exists():
        raise RuntimeError(f"pytest ended with status {status} and left no report")
    became = {
        f"{c.get('classname')}::{c.get('name')}": _became(c)
        for c in ElementTree.parse(report).iter("testcase")
    }
    passed = sum(state == "passed" for state in became.values())
    others = [f"{state}: {name}" for name, state in became.items() if state != "passed"]
    reading = f"{passed} of {len(became)} passed"
    return Found(reading, right=0 < passed == len(became), values=became, beside=others)


def _became(case: ElementTree.Element) -> str:
    for tag, state in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        if (child := case.find(tag)) is not None:
            return f"{state} ({' '.join((child.get('message') or '').split())[:200]})"
    return "passed"


PART = Part("tests", "The tests that need a GPU", 1, items)
