"""Cache the first page for the next start: verdict and charts of the embedded suite, drawn before torch is loaded.

The key is a hash of the suite's files, of featcal's code and of its version, so after a change the page is measured
again. This module does not import torch, which takes seconds.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from app.cards import Card
from featcal.figures import charts, ledger_charts
from featcal.figures.names import join_percent, plain
from featcal.figures.verdict.sentences import Sentence, Verdict
from featcal.system.atomic_files import put
from featcal.system.resources import cache_folder, code_digest, data_path
from featcal.system.versions import TELLING, versions

HOME_SUITE = "clip-mini"
"""Suite that the app opens on."""
SAMPLES = 64
"""Default number of samples per task of a measurement."""


@dataclass(frozen=True)
class FirstPage:
    """The first page's headline, its verdict and the tables of its charts, for the mean over tasks."""

    cards: Sequence[Card]
    verdict: Verdict
    booked: pd.DataFrame
    """Rows of `ledger_tables.attribution_table` for the merge."""
    layers: Mapping[str, pd.DataFrame]
    """Model → rows of `tables.layer_rows`, relative; the merge first."""


def keep_first_page(found: FirstPage) -> None:
    """Cache the content of the first page; if the folder cannot be written, only the next start takes longer."""
    file = _file()
    tables = {
        "booked": _format_table(found.booked),
        "layers": {name: _format_table(one) for name, one in found.layers.items()},
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        cards = [asdict(card) for card in found.cards]
        put(file, json.dumps({"cards": cards, "verdict": found.verdict.to_json(), **tables}))
    except OSError as error:
        # A cache that cannot be written costs the next start some seconds, which is no reason to stop.
        print(f"featcal: the first page is not kept in {file.parent}: {error.strerror}", file=sys.stderr)


def read_kept() -> FirstPage | None:
    """Read the cached content of the first page for the current files, if there is one."""
    file = _file()
    if not file.is_file():
        return None
    document = json.loads(file.read_text(encoding="utf-8"))
    layers = {name: _read_table(one) for name, one in document["layers"].items()}
    cards = [Card(**card) for card in document["cards"]]
    return FirstPage(cards, Verdict.from_json(document["verdict"]), _read_table(document["booked"]), layers)


def write_verdict_lines(verdict: Verdict) -> None:
    """Write the lines of a verdict, except for the last two, which are shown with the button."""
    for number, one in enumerate(shown_sentences(verdict)):
        st.markdown(format_line(one, number == 0))


def format_line(one: Sentence, is_first: bool) -> str:
    """Return a line of the list as Markdown, with no-break spaces between numbers and signs."""
    words = join_percent(plain(one.text))
    return f"- **{words}**" if is_first else f"- {words}"


def shown_sentences(verdict: Verdict) -> list[Sentence]:
    """Return the lines of a verdict for the list."""
    return [one for one in verdict.sentences if one.about not in ("next", "samples")]


def figures(kept: FirstPage, chosen: str | None = None) -> tuple[go.Figure, go.Figure]:
    """Draw the two charts below a verdict: the final drift of the merge attributed to layers, and both parts of the
    drift of all models on one axis."""
    merge = next(iter(kept.layers))
    return ledger_charts.waterfall({merge: kept.booked}, chosen), charts.drift_layers(kept.layers, True, chosen)


def _format_table(table: pd.DataFrame) -> str:
    return str(table.to_json(orient="table", index=False))


def _read_table(text: str) -> pd.DataFrame:
    return pd.read_json(StringIO(text), orient="table")


def _file() -> Path:
    """Return the cache file for the current suite files and code."""
    made_by = versions(TELLING)  # other ones move the last digits, as in the history
    digest = hashlib.sha256(f"{made_by} {SAMPLES} {code_digest()}".encode())
    suite = data_path(HOME_SUITE)
    for path in sorted(suite.rglob("*")):
        if path.suffix in (".safetensors", ".json", ".yaml", ".npz"):
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    return cache_folder() / f"{HOME_SUITE}-{digest.hexdigest()[:24]}.json"
