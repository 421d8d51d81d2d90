"""Write reports: one HTML page per run, comparison or advice, and its figures for a paper."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sartor.core.errors import MissingExtraError

if TYPE_CHECKING:
    from sartor.report.page import Source
    from sartor.report.printing import Format

__all__ = ["write_client", "write_figures", "write_report"]


def write_report(source: Source, path: str | Path | None = None) -> Path:
    """Write one page; see :func:`sartor.report.page.write_report`."""
    with _extras():
        from sartor.report import page

        return page.write_report(source, path)


def write_client(source: str | Path, client: str, folder: str | Path | None = None) -> Path:
    """Write the page of one client; see :func:`sartor.report.page.write_client`."""
    with _extras():
        from sartor.report import page

        return page.write_client(source, client, folder)


def write_figures(
    source: Source, folder: str | Path | None = None, kind: Format = "pdf"
) -> list[Path]:
    """Write figures for a paper; see :func:`sartor.report.page.write_figures`."""
    with _extras():
        from sartor.report import page

        return page.write_figures(source, folder, kind)


@contextmanager
def _extras() -> Iterator[None]:
    """Name the extra to install if one of its packages is missing."""
    try:
        yield
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] not in ("matplotlib", "jinja2"):
            raise
        raise MissingExtraError(
            f"Reports and figures need {error.name}, which is not installed; run pip install "
            "'sartor[figures]'."
        ) from error
