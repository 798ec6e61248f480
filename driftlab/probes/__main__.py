"""Prints the probes as the table of docs/verdict.md."""

from driftlab.probes import every_probe


def as_markdown() -> str:
    """A row a probe: its name, what it asks, what it sees and what it cannot see, its threshold."""
    rows = [("probe", "asks", "turns at", "sees", "cannot see"), ("---",) * 5]
    for probe in every_probe():
        number = "" if probe.threshold is None else f"{probe.threshold:.3g}"
        turns = ": ".join(text for text in (number, probe.reason) if text)
        question = probe.question.format(role="the candidate")
        rows.append((f"`{probe.name}`", question, turns, probe.sees, probe.misses))
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


if __name__ == "__main__":
    print(as_markdown())
