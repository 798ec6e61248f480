"""Judges the pairs in 16 bits: ``python -m bench.low_precision [words] [--held-out | --first] [--dry]``.

The whole of them is written under ``results/published/low_precision/``; a part is shown alone.
"""

from __future__ import annotations

import argparse
import csv
import io
from pathlib import Path

from bench.low_precision.case import cases
from bench.low_precision.judged import OURS, TOLERANCE, Judged, judged, rates, summary, together, wrong
from bench.rates import FIRST, rates_csv
from driftlab.glossary import PUBLISHED_NOTE
from driftlab.record.seed_record import write_whole

PUBLISHED = Path(__file__).resolve().parents[2] / "results" / "published" / "low_precision"
TITLE = f"# Pairs in 16 bits\n\n{PUBLISHED_NOTE}\n"
ASKED = """**Asked.** Does `assert_equivalent`, without a tolerance and on one thread, say what is known of
small kernels in bfloat16 and float16: right ones, wrong ones and ones in fewer bits? Beside it:
`torch.testing.assert_close` on outputs and gradients, with the tolerances that projects of such kernels have
in their tests. The code: `bench/low_precision/`.
"""
SURE = """
**How sure.** On the CPU alone. The pairs were written by people who had not seen the diagnosis, half of them
held out; they are no sample of anybody's code. In brackets: Clopper and Pearson's interval of 95 %. As
numbers: [rates.csv](rates.csv).
"""
AT_FIRST = """
## At first sight

The held-out half was judged once, after the rules had been tuned on the other half. This is what came out
([held_out_first.csv](held_out_first.csv)); what was wrong in kind was mended then, so that the table above is
no estimate for new pairs, and this one is. Three are a matter of what a pair is called: `lengths_*` divide by
a length without the reference's least one, which rows of zeros show; `one_plus_rounded_twice` rounds the
gradient of a weight to float16, which the reference keeps in float32.
"""
MADE = """
## How it was made

`python -m bench.low_precision`
"""


def main() -> int:
    arguments, found = _arguments(), []
    for case in cases():
        if arguments.half not in (None, case.held_out) or not _named(case.name, arguments.words):
            continue
        found.append(one := judged(case))
        mark, habit = "" if one.right else "WRONG", "accused" if one.by_tolerance else "passed"
        said = f"{one.label}, said {one.said} {one.measured} in {one.seconds} s, by tolerance {habit}"
        print(f"{mark:6}{one.name} ({one.precision}): {said}", flush=True)
    print(summary(rates(found)))
    if arguments.half is None and not arguments.words and not arguments.dry:
        publish(found)
    return 0


def publish(found: list[Judged]) -> None:
    """What the held-out half gave when it was judged for the first time stays as it was."""
    PUBLISHED.mkdir(parents=True, exist_ok=True)
    first = PUBLISHED / "held_out_first.csv"
    if not first.exists():
        write_whole(first, as_csv([one for one in found if one.held_out]))
    seen = [Judged.of(row) for row in csv.DictReader(io.StringIO(first.read_text()))]
    write_whole(PUBLISHED / "cases.csv", as_csv(found))
    write_whole(PUBLISHED / "rates.csv", rates_csv([*rates(found), *rates(seen, FIRST)]))
    write_whole(PUBLISHED / "README.md", page(found, seen))


def page(found: list[Judged], seen: list[Judged]) -> str:
    """What was asked and found, how sure it is, the tables; ``seen``: the held-out half at first sight."""
    today, first = rates(found), rates(seen, FIRST)
    said = (
        "**Found.**\n",
        f"- At first sight, which is the estimate for a new pair: right about {together(first, OURS)}.",
        f"- Today: right about {together(today, OURS)}.",
        f"- By tolerance: right about {together(today, TOLERANCE)}.",
    )
    parts = (TITLE, ASKED, *said, SURE, "## Today\n", summary(today), wrong(found))
    return "\n".join((*parts, AT_FIRST, summary(first), wrong(seen), MADE))


def as_csv(found: list[Judged]) -> str:
    table = io.StringIO()
    writer = csv.DictWriter(table, list(found[0].as_dict()))
    writer.writeheader()
    writer.writerows(one.as_dict() for one in found)
    return table.getvalue()


def _named(name: str, words: list[str]) -> bool:
    return not words or any(word in name for word in words)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="of the names of cases")
    parser.add_argument("--first", dest="half", action="store_const", const=False)
    parser.add_argument("--held-out", dest="half", action="store_const", const=True)
    parser.add_argument("--dry", action="store_true", help="write nothing")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
