"""Show the picture of a sample beside the point under the mouse, because plotly's hovers show only text."""

from __future__ import annotations

import base64
import io
import math

import numpy as np
import streamlit as st
from PIL import Image

from featcal.samples.sources import Samples
from featcal.session.open_suite import ResultKind
from featcal.session.session import Session
from featcal.suite.views import EvaluationSamples

EDGES = ((256, 64), (1024, 48))
"""Number of pictures → pixels of a picture's edge up to that number; with more pictures it has `SMALLEST`."""
SMALLEST = 32
_SHEET = ResultKind[tuple[str, int]]("sheet of small pictures")

_picture = st.components.v2.component(
    "featcal_hover_picture",
    js="""
export default function ({ data }) {
  const shown = document.createElement("div");
  shown.className = "featcal-hover-picture";
  shown.setAttribute("aria-hidden", "true");
  shown.style.cssText = `position: fixed; display: none; z-index: 999; pointer-events: none; box-sizing: content-box;
    width: 96px; height: 96px; border: 1px solid #8A8F98; border-radius: 6px; background-image: url(${data.sheet});
    background-size: ${100 * data.columns}% auto`;
  document.body.append(shown);
  const over = (event) => {
    const place = event.points[0]?.customdata, mouse = event.event;
    if (place === undefined || !mouse) return;
    const column = place % data.columns, row = Math.floor(place / data.columns);
    shown.style.backgroundPosition = `-${96 * column}px -${96 * row}px`;
    // Words stand to the right of a point where there is room: the picture stands to its left, or below.
    shown.style.left = `${mouse.clientX > 130 ? mouse.clientX - 116 : mouse.clientX + 20}px`;
    shown.style.top = `${Math.max(8, Math.min(mouse.clientY - 48, window.innerHeight - 104))}px`;
    shown.style.display = "block";
  };
  const out = () => { shown.style.display = "none"; };
  let chart = null;
  const leave = () => {
    chart?.removeListener?.("plotly_hover", over);
    chart?.removeListener?.("plotly_unhover", out);
  };
  // The chart may be drawn after this, and anew at any time.
  const look = setInterval(() => {
    const found = document.querySelector(`.st-key-${data.chart} .js-plotly-plot`);
    if (found === chart || !found?.on) return;
    leave();
    out();
    chart = found;
    chart.on("plotly_hover", over);
    chart.on("plotly_unhover", out);
  }, 300);
  return () => { clearInterval(look); leave(); shown.remove(); };
}
""",
)


def add_hover_pictures(chart: str, session: Session, task: str, on: EvaluationSamples) -> None:
    """Add hover pictures to a chart whose points carry numbers of samples; nothing if there are no pictures.

    Args:
        chart: key of the chart.
    """
    data = session.viewable_samples(task, on)
    if data.images is None or not len(data):
        return
    sheet, columns = session.get_or_make(_SHEET, (task, *session.key(on)), lambda: picture_sheet(data))
    _picture(data={"chart": chart, "sheet": sheet, "columns": columns}, key=f"hover-{chart}", height=1)


def picture_sheet(data: Samples) -> tuple[str, int]:
    """Return all pictures of samples in one grid, as the data address of a JPEG, and the number per row."""
    assert data.images is not None
    count = len(data)
    edge = next((edge for most, edge in EDGES if count <= most), SMALLEST)
    columns = math.ceil(math.sqrt(count))
    sheet = Image.new("RGB", (columns * edge, math.ceil(count / columns) * edge))
    for place in range(count):
        small = Image.fromarray(np.asarray(data.images[place])).convert("RGB").resize((edge, edge))
        sheet.paste(small, (place % columns * edge, place // columns * edge))
    written = io.BytesIO()
    sheet.save(written, "JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(written.getvalue()).decode()}", columns
