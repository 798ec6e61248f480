"""Writes the note's numbers from the committed tables, and compiles it: numbers.json and note.pdf.

uv run --group note docs/note/build.py             both
uv run --group note docs/note/build.py --pages DIR the pages as PNG too, to look at
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from pathlib import Path

from docs.note.values import numbers

NOTE = Path(__file__).resolve().parent
ROOT = NOTE.parents[1]
WRITTEN = ("note.typ", "style.typ", "references.bib", "numbers.json")


def main() -> int:
    """Write both; 0 where they are written, 2 with a line that says what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pages", type=Path, metavar="DIR", help="write the pages there as PNG too")
    pages = parser.parse_args().pages
    try:
        import typst
    except ModuleNotFoundError:
        print("the note is set by Typst: uv run --group note docs/note/build.py", file=sys.stderr)
        return 2
    try:
        (NOTE / "numbers.json").write_text(as_json(), encoding="utf-8")
        compile_to(NOTE / "note.pdf")
        if pages:
            pages.mkdir(parents=True, exist_ok=True)
            compile_to(pages / "page-{p}.png")
    except (OSError, ValueError, typst.TypstError) as error:
        print(f"the note is not written: {error}", file=sys.stderr)
        return 2
    return 0


def as_json() -> str:
    """The text of numbers.json, as the tables stand."""
    return json.dumps(numbers(), indent=1, ensure_ascii=False) + "\n"


def compile_to(output: Path) -> None:
    """Compile the note with Typst's own fonts; the same sources give the same bytes.

    Raises:
        typst.TypstError: where the source is wrong, or names a number that numbers.json lacks.
    """
    import typst  # in a dependency group of its own

    typst.compile(
        NOTE / "note.typ",
        output=str(output),
        root=str(ROOT),
        font_paths=typst.Fonts(include_system_fonts=False),
        sys_inputs={"sources": digest()},
        ppi=110,
    )


def digest() -> str:
    """SHA-256 over what the PDF is made of. The PDF carries it among its keywords."""
    joined = hashlib.sha256()
    for path in sources():
        joined.update(hashlib.sha256(path.read_bytes()).digest())
    return joined.hexdigest()


def sources() -> list[Path]:
    """The files that the PDF is made of, figures included."""
    figures = re.findall(r'"/(results/published/[^"]+)"', (NOTE / "note.typ").read_text(encoding="utf-8"))
    return [*(NOTE / name for name in WRITTEN), *(ROOT / figure for figure in figures)]


if __name__ == "__main__":
    sys.exit(main())
