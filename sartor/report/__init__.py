"""Write reports: one HTML page per run, comparison or advice, and its figures for a paper."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sartor.core.errors import MissingExtraError, RunFolderError

if TYPE_CHECKING:
    from sartor.data.examination import Examination
    from sartor.report.page import Source
    from sartor.report.printing import Format
    from sartor.results.tables import Table

__all__ = ["write_client", "write_examination", "write_figures", "write_report"]


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


def write_examination(
    found: Examination, tables: Sequence[Table], command: str, path: str | Path
) -> Path:
    """Write the page of an examined table; see ``examination_page.render_examination``."""
    with _extras():
        from sartor.report.examination_page import render_examination

        text = render_examination(found, tables, command)
    file = Path(path)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunFolderError(f"{file} cannot be written: {error}; choose another place.") from error
    return file


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
