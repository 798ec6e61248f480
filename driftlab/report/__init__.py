"""The report: one self-contained page that shows a verdict and what it rests on."""

from driftlab.report.page import write_report

__all__ = ["write_report"]
