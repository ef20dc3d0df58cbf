"""The lower half of the Drift page: attribution, growth, effect on decisions, feature sources."""

from __future__ import annotations

from collections.abc import Mapping

import streamlit as st

from app import ledger_charts, ledger_tables, state, tables, text, view
from app.workspace import ModelId, Workspace
from featcal.calibration.config import CalibrationConfig
from featcal.drift.ledger import DriftLedger


def sections(ws: Workspace, models: Mapping[str, ModelId], n: int, over: str, task: str, layer: str) -> None:
    """Attribution and growth over `over` (a task or the mean), decisions task by task and sample by sample."""
    st.subheader("Which layer caused the final drift?")
    one, two, _ = st.columns([3, 3, 5])
    fine = view.choice("Layers", ["blocks", "attention and MLP"], "parts", one) != "blocks"
    class_token = False
    if ws.family.adapter.class_token:
        class_token = view.choice("Norms over", ["all tokens", "class token"], "tokens", two) != "all tokens"
    with state.progress() as report:
        ledgers = {name: ws.ledger(model, n, class_token, fine, report) for name, model in models.items()}
    booked = {name: ledger_tables.attribution(ledger, over) for name, ledger in ledgers.items()}
    view.chart(
        ledger_charts.waterfall(booked, layer),
        "attribution",
        f"Contribution of every layer to the final drift on {over}",
        text.ATTRIBUTION,
    )
    st.subheader("Does drift grow on its way?")
    grown = {name: ledger_tables.growth(ledger, over) for name, ledger in ledgers.items()}
    view.chart(ledger_charts.growth(grown, layer), "growth", f"Growth of drift per block on {over}", text.GROWTH)
    with st.expander("Table", icon=":material/table:"):
        joined = [booked[name].merge(grown[name], how="left").assign(model=name) for name in ledgers]
        view.table(tables.stacked(joined), f"ledger-{ws.family.suite.name}.csv")
    _decisions(ws, ledgers, task)


def _decisions(ws: Workspace, ledgers: Mapping[str, DriftLedger], task: str) -> None:
    st.subheader("What does it do to decisions?")
    if any(one.output is None for ledger in ledgers.values() for one in ledger.tasks.values()):
        needed = "answers ('target')" if ws.is_text else "labels, class names and a base with a text tower"
        st.info(f"Scores need {needed}.", icon=":material/info:")
        return
    view.chart(
        ledger_charts.outputs({name: ledger_tables.outputs(ledger) for name, ledger in ledgers.items()}),
        "outputs",
        "Score drift with its bound, and decisions that agree or are certified, per task",
        text.OUTPUTS_OF_TEXT if ws.is_text else text.OUTPUTS,
    )
    with st.expander(f"Every sample of {task}: margin and drift", icon=":material/table:"):
        rows = [ledger_tables.margins(ledger, task).assign(model=name) for name, ledger in ledgers.items()]
        view.table(tables.stacked(rows), f"margins-{ws.family.suite.name}-{task}.csv")


def sources(ws: Workspace, config: CalibrationConfig) -> None:
    """What other feature sources would have cost, measured when asked for."""
    st.subheader("Was it right to refresh features block by block?")
    wanted = state.selection().sources
    state.control(st.toggle, "sources", wanted, False, "Measure what other feature sources would have cost")
    if not wanted:
        return
    with state.progress() as report:
        found = ws.sources(config, report)
    frame = ledger_tables.sources(found, ws.block_layers)
    view.chart(ledger_charts.sources(frame), "sources-chart", "Excess per source", text.SOURCES)
