"""The report: one self-contained page that shows a verdict and what it rests on."""

from driftlab.extras import extra

with extra("report", "matplotlib"):
    from driftlab.report.page import write_report

__all__ = ["write_report"]
