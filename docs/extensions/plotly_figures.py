"""Show plotly's figures on the site: alive, in the colours of the page, drawn by a script that lies on the site.

A figure that ends a block of an example is written as JSON; `static/figures.js` draws it. Plotly's own way of writing
figures asks hosts for its script and for MathJax.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import plotly.io
from plotly.io._base_renderers import MimetypeRenderer
from plotly.offline import get_plotlyjs
from sphinx.application import Sphinx

SCRIPT = "plotly.min.js"
_PLACE = "plotly-figure"
"""Class of the elements that the script draws in."""


class _Json(MimetypeRenderer):
    """Write a figure as an element that the script of the site finds and draws."""

    def to_mimebundle(self, figure: dict[str, Any]) -> dict[str, str]:
        whole = go.Figure(figure)
        height = whole.layout.height or 420
        # Without any "<" the JSON cannot end the element that it stands in.
        content = (whole.to_json() or "").replace("<", "\\u003c")
        title = escape(whole.layout.title.text or "Chart", quote=True)
        return {
            "text/html": f'<div class="{_PLACE}" role="img" aria-label="{title}" style="height: {height}px">'
            f'<script type="application/json">{content}</script></div>'
        }


plotly.io.renderers["site"] = _Json()
plotly.io.renderers.default = "site"


def scrape(block: object, names: object, configuration: object) -> str:
    """Add nothing to a block: what ends it is shown by its own representation."""
    return ""


def add_scripts(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Load plotly on pages that have a figure, and on no other: it is large."""
    if f'class="{_PLACE}"' in context.get("body", ""):
        app.add_js_file(SCRIPT)
        app.add_js_file("figures.js")


def write_script(app: Sphinx, error: Exception | None) -> None:
    """Put plotly's script beside the site's own."""
    if error is None and app.builder.format == "html":
        (Path(app.outdir) / "_static" / SCRIPT).write_text(get_plotlyjs(), encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect both to the build."""
    app.connect("html-page-context", add_scripts)
    app.connect("build-finished", write_script)
    return {"parallel_read_safe": True}
