"""The report: one HTML page per run or comparison, self-contained and readable offline."""

from __future__ import annotations

from sartor.report.page import write_report

__all__ = ["write_report"]
