"""Lay a report out as one HTML file that refers to no other file or host, and whose policy forbids requests."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from featcal.figures.commands import command_lines, python_lines
from featcal.figures.report.content import ReportContent


def report_page(content: ReportContent) -> str:
    """Return the whole file; text from outside is escaped."""
    scripts = {"plotly": get_plotlyjs(), "script": _resource("draw.js")}
    # StrictUndefined: a misspelt name in the template fails here, instead of leaving a gap in the report.
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(_resource("page.html.jinja"))
    return template.render(
        content=content,
        commands=command_lines,
        python=python_lines,
        figures=Markup(_figures(content)),
        hashes=Markup(" ".join(f"'sha256-{_digest(script)}'" for script in scripts.values())),
        **{name: Markup(script) for name, script in scripts.items()},
    )


def _figures(content: ReportContent) -> str:
    """Return name → figure as JSON."""
    inner = ",".join(f'"{figure.name}":{figure.chart.to_json()}' for figure in content.figures)
    # Without any "<" the JSON cannot end the script element that it stands in.
    return f"{{{inner}}}".replace("<", "\\u003c")


def _digest(script: str) -> str:
    """Return the hash of a script for the page's policy."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _resource(name: str) -> str:
    return files("featcal.figures.report").joinpath(name).read_text(encoding="utf-8")
