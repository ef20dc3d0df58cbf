"""Draw figures as SVG files, by kaleido in the Chrome or Chromium of this machine: plotly needs a browser."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from featcal.figures.report.content import Figure
from featcal.system.extras import install_command, is_installed, require_packages

WIDTH = 1000
"""Pixels of a figure."""
NEEDS = (
    f"there are no figures here: drawing them as SVG needs kaleido ({install_command('kaleido')}) and a Chrome or "
    "Chromium, on the path or named by BROWSER_PATH; a report as HTML needs neither"
)


def can_draw() -> bool:
    """Say whether kaleido and a browser for it are available."""
    if not is_installed("kaleido"):
        return False
    from choreographer.browsers import Chromium

    return Chromium.find_browser(skip_local=False) is not None


def write_figures(figures: Sequence[Figure], folder: Path) -> dict[str, str]:
    """Write every figure and return name → file name; the browser that draws them gets only local files."""
    require_packages("kaleido")
    import kaleido
    from kaleido import PageGenerator

    found = {figure.name: f"{figure.name}.svg" for figure in figures}
    jobs = [
        {
            "fig": figure.chart.to_dict(),
            "path": str(folder / found[figure.name]),
            "opts": {"format": "svg", "width": WIDTH, "height": figure.chart.layout.height or 400},
        }
        for figure in figures
    ]
    page = PageGenerator(mathjax=False)  # MathJax would be fetched from a host
    kaleido.write_fig_from_object_sync(jobs, kopts={"page_generator": page})
    return found
