"""Measure, lay out and write a report, completely or not at all."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from featcal.figures.report import html, markdown, svg
from featcal.figures.report.content import ReportContent
from featcal.figures.report.measure import ReportOrder, gather
from featcal.figures.report.models import name_models
from featcal.session.session import Session
from featcal.suite.views import EvaluationSamples
from featcal.system.atomic_files import put_new, temporary_path
from featcal.system.errors import InputError
from featcal.system.progress import Progress, silent

MODELS = ("merged", "calibrated")
"""Default models of a report."""


def write_report(
    session: Session,
    reference: str,
    out: Path,
    *,
    models: Sequence[str] = MODELS,
    on: EvaluationSamples | None = None,
    about: Sequence[str] | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Write a report of some models of a suite.

    Args:
        reference: name or file of the suite in commands.
        out: a file that ends in .html or .md and is not there yet; figures of report.md go to the folder
            report-figures beside it.
        models: their names; the first is the reference of comparisons.
        on: samples of the drift measurement; by default 64 of each task.
        about: lines that the report begins with; left out, its own verdict on the first model.

    Returns:
        The document of `featcal report --json`: `out`, names of `figures` that are files of their own, `bytes` of the
        file, lines of the `verdict` that it begins with, `notes`.

    Raises:
        InputError: `out` cannot be written, models cannot be shown together, or one cannot be opened or measured.
        NumericalError: features or scores that are not finite.
    """
    beside = free(out)
    asked = ReportOrder(session, reference, name_models(models, session), on or EvaluationSamples(), about)
    notes = [svg.NEEDS] if beside is not None and not svg.can_draw() else []
    content = gather(asked, progress)
    try:
        if beside is None:
            drawn: list[str] = []
            written = html.report_page(content)
        elif notes:
            drawn, written = [], markdown.document(content, {}, notes[0])
        else:
            places = _figures(content, beside)
            drawn, written = list(places.values()), markdown.document(content, places)
        # Figures are in place already: without the text that names them nobody would know what they are.
        with _remove_on_failure(beside if drawn else None):
            put_new(out, written)
    except OSError as error:
        raise InputError(f"cannot write {out}: {error.strerror or error}") from error
    size = out.stat().st_size
    return {"out": str(out), "figures": drawn, "bytes": size, "verdict": list(content.about), "notes": notes}


def report_line(reference: str, names: Sequence[str], on: EvaluationSamples) -> str:
    """Return the command line that writes this report.

    >>> report_line("clip-mini", ["merged"], EvaluationSamples(16))
    'featcal report clip-mini --model merged --eval-samples 16 --seed 42 --out report.html'
    """
    models = [word for name in names for word in ("--model", name)]
    return shlex.join(["featcal", "report", reference, *models, *on.flags(), "--out", "report.html"])


def free(out: Path, *more: Path) -> Path | None:
    """Check that a report can be written, and return the folder of its figures; None if they are inside.

    Args:
        more: other files that are to be written with it.

    Raises:
        InputError: another ending, a missing folder, or an existing file.
    """
    if out.suffix not in (".html", ".md"):
        raise InputError(f"{out}: a report ends in .html (one file) or .md (Markdown, figures beside it)")
    if not out.parent.is_dir():
        raise InputError(f"{out.parent} is not a folder; make it first")
    beside = out.with_name(f"{out.stem}-figures") if out.suffix == ".md" else None
    for place in (out, beside, *more):
        if place is not None and place.exists():
            raise InputError(f"{place} already exists; choose another name or remove it")
    return beside


def _figures(content: ReportContent, folder: Path) -> dict[str, str]:
    """Draw all figures into a folder that appears only when it is complete; return name → path relative to the
    report."""
    # A folder that appears whole by its renaming: a stopped report leaves none that looks finished.
    drawing = temporary_path(folder)
    drawing.mkdir()
    try:
        files = svg.write_figures(content.figures, drawing)
        drawing.rename(folder)
    except OSError:
        raise
    except Exception as error:  # of the browser that draws: each has a kind of its own
        raise InputError(f"{folder.name}: figures could not be drawn ({type(error).__name__}: {error})") from error
    finally:
        shutil.rmtree(drawing, ignore_errors=True)
    return {name: f"{folder.name}/{file}" for name, file in files.items()}


@contextmanager
def _remove_on_failure(folder: Path | None) -> Iterator[None]:
    """Remove a folder if the `with` fails, because it is useless without its result."""
    try:
        yield
    except BaseException:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        raise
