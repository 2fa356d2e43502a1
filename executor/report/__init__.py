"""`dflow report`: what runs did, as one HTML file."""

from executor.report.page import write_report

__all__ = ["write_report"]
