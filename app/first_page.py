"""Keep the first page for the next start: verdict and charts of the embedded suite, drawn before torch is loaded.

What was measured is kept under a hash of the suite's files, of featcal's code and of its version, so a changed file is
measured anew. Nothing in here imports torch, which takes seconds.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

import featcal
from featcal.figures import charts, ledger_charts
from featcal.figures.names import plain
from featcal.figures.verdict.sentences import Verdict
from featcal.system.atomic_files import put
from featcal.system.resources import cache_folder, code_digest, data_path

HOME_SUITE = "clip-mini"
"""Suite that the app opens on."""
SAMPLES = 64
"""Samples per task that models are measured on unless the user says otherwise."""
TITLE = "What did merging do?"
"""Header of the page that the app opens on."""


@dataclass(frozen=True)
class FirstPage:
    """The first page's verdict and the tables of its charts, for the merged model and the mean over tasks."""

    verdict: Verdict
    booked: pd.DataFrame
    """Rows of `ledger_tables.attribution`."""
    layers: pd.DataFrame
    """Rows of `tables.layer_rows`, relative."""


def keep(found: FirstPage) -> None:
    """Keep what the first page shows; a folder that cannot be written only costs the next start time."""
    file = _file()
    tables = {name: getattr(found, name).to_json(orient="table", index=False) for name in ("booked", "layers")}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        put(file, json.dumps({"verdict": found.verdict.to_json(), **tables}))
    except OSError as error:
        # A cache that cannot be written costs the next start some seconds, which is no reason to stop.
        print(f"featcal: the first page is not kept in {file.parent}: {error.strerror}", file=sys.stderr)


def read_kept() -> FirstPage | None:
    """Read what the first page shows of these very files, if it was measured before."""
    file = _file()
    if not file.is_file():
        return None
    document = json.loads(file.read_text(encoding="utf-8"))
    tables = [pd.read_json(StringIO(document[name]), orient="table") for name in ("booked", "layers")]
    return FirstPage(Verdict.from_json(document["verdict"]), *tables)


def say(verdict: Verdict) -> None:
    """Write the lines of a verdict, but for the last two, which stand at the button and below it."""
    first, *others = (plain(one.text) for one in verdict.sentences if one.about not in ("next", "samples"))
    st.markdown("\n".join([f"- **{first}**", *(f"- {one}" for one in others)]))


def figures(
    booked: Mapping[str, pd.DataFrame], layers: Mapping[str, pd.DataFrame], chosen: str | None = None
) -> tuple[go.Figure, go.Figure]:
    """Draw the two charts below a verdict, by model: the final drift booked to layers, and both parts of the drift."""
    return ledger_charts.waterfall(booked, chosen), charts.drift_layers(layers, True, chosen)


def _file() -> Path:
    """Return the file that keeps the measurement of the suite and the code as they are now."""
    digest = hashlib.sha256(f"{featcal.__version__} {SAMPLES} {code_digest()}".encode())
    suite = data_path(HOME_SUITE)
    for path in sorted(suite.rglob("*")):
        if path.suffix in (".safetensors", ".json", ".yaml", ".npz"):
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    return cache_folder() / f"{HOME_SUITE}-{digest.hexdigest()[:24]}.json"
