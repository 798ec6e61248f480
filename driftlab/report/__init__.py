"""The report: one self-contained page that shows a verdict and what it rests on."""

from driftlab.extras import extra

with extra("report", "matplotlib"):
    from driftlab.report.page import as_page, write_report

__all__ = ["as_page", "write_report"]
