"""Method tables on a page: of the selected suite, across suites, and the paper's own beside them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import pandas as pd
import streamlit as st

from app import state, view
from app.downloads import Numbers, Origin
from featcal.errors import FeatcalError
from featcal.figures import study_charts, study_tables, text
from featcal.figures.names import plain
from featcal.runs import suite_hash
from featcal.studies import kept
from featcal.studies.needs import NEEDS
from featcal.studies.paper import PaperTable, paper_tables
from featcal.studies.plan import SAMPLES, SEEDS
from featcal.studies.study import Study

KIND = "compare"
HIDDEN = ("seeds", "wall s", "failure")
"""Columns of the method table that are in the download and not on the page."""


def measured() -> None:
    """What was measured of the selected suite, and of every suite side by side."""
    own, problems = kept.own()
    own, shipped = ([study for study in of if study.kind == KIND] for of in (own, kept.shipped()))
    for problem in problems:
        st.warning(plain(problem), icon=":material/history_toggle_off:")
    try:
        suite, _ = state.opened_files()
        here = suite_hash(suite)
    except FeatcalError as error:
        view.problem(error)
        view.offer_home()
        here = ""
    of_suite = [study for study in own if study.suite_hash == here]
    of_suite += [study for study in shipped if study.suite == state.reference()]  # whose file is featcal's own
    if of_suite:
        _table(_chosen(of_suite))
    elif here:
        st.info("Nothing was measured of this suite yet; the command below does.", icon=":material/leaderboard:")
    if here:
        _command()
    _suites([*own, *shipped])


def _chosen(studies: Sequence[Study]) -> Study:
    """One of several tables of the same suite, the newest first."""
    if len(studies) == 1:
        return studies[0]
    names = [f"{number + 1}: {_on(study)}" for number, study in enumerate(studies)]
    picked = st.selectbox("Table", range(len(names)), format_func=lambda number: names[number], key="which-table")
    return studies[picked]


def _table(study: Study) -> None:
    """The chart and the table of one study."""
    frame = study_tables.method_table(study.summaries())
    st.caption(plain(_on(study)))
    ranked = frame[frame["average"].notna()].sort_values("average", ascending=False, kind="stable")
    numbers = Numbers("methods", frame, "scores in %; drift: norm / norm of the expert's", _origin(study), digits=2)
    if len(ranked):
        best = "; ".join(f"{row['method']} {row['average']:.1f} %" for row in ranked.head(4).to_dict("records"))
        alt = f"Average score of {len(ranked)} methods: {best}"
        view.picture(study_charts.leaderboard(frame), "leaderboard", alt, numbers.name)
    order = pd.concat([ranked, frame[frame["average"].isna()]])
    st.dataframe(
        order.drop(columns=list(HIDDEN)),
        hide_index=True,
        column_config={**view.formats(numbers), **_widths(order)},
        alt=f"{len(frame)} methods: score, cost and what each needs",
    )
    for row in frame[frame["failure"] != ""].to_dict("records"):
        st.caption(plain(f"{row['method']}: {row['failure']}"))
    view.explain(text.LEADERBOARD)
    view.csv(numbers)


def _widths(frame: pd.DataFrame) -> dict[str, Any]:
    number = st.column_config.NumberColumn
    return {
        "method": st.column_config.TextColumn(width="medium", pinned=True),
        **{name: number(format="%.1f") for name in ("average", "interval", "normalised", "worst", "CPU s")},
        "MB": number(format="%.0f"),
        **{name: st.column_config.CheckboxColumn(width="small") for name in NEEDS if name in frame},
    }


def _suites(studies: Sequence[Study]) -> None:
    """Every method against every suite."""
    st.subheader("Every suite")
    if not studies:
        st.info("No table was measured yet.", icon=":material/leaderboard:")
        return
    frame = study_tables.across_suites(studies)
    st.caption("Score as a share of the experts', mean over tasks, in %: the one number that suites have in common.")
    form = st.column_config.NumberColumn(format="%.1f")
    st.dataframe(
        frame,
        hide_index=True,
        column_config={name: form for name in frame.columns if name != "method"},
        alt=f"{len(frame)} methods on {len(frame.columns) - 1} suites",
    )


def paper() -> None:
    """The paper's tables as printed; misprints are marked."""
    st.subheader("As printed in the paper")
    tables, here = paper_tables(), state.reference()
    own = next((number for number, one in enumerate(tables) if one.suite == here), 0)
    picked = st.selectbox(
        "Table of the paper", range(len(tables)), own, format_func=lambda number: tables[number].name, key="paper-table"
    )
    table: PaperTable = tables[picked]
    st.caption(
        f"The numbers of the [paper]({text.PAPER}), not measured here: other models, data and machines than the toy "
        f"suites'. {table.note}"
    )
    frame = study_tables.paper_table(table)
    st.dataframe(frame, hide_index=True, alt=f"{table.name}, {len(frame)} rows as printed")


def _command() -> None:
    """How such a table is measured."""
    seeds = ",".join(map(str, SEEDS))
    command = ["featcal", "compare", state.reference(), "--methods", "all", "--samples", str(SAMPLES), "--seeds", seeds]
    with st.popover("Measure it again", icon=":material/terminal:"):
        st.caption("It goes on where it stopped, and this page finds what it gives. Name methods instead of all.")
        st.code(shlex.join(command), language="bash", wrap_lines=True)


def _on(study: Study) -> str:
    """What a study was measured on, in words."""
    scores, drift = study.on["scores"], study.on["drift"]
    count = "all" if scores["samples"] is None else str(scores["samples"])
    seeds = sorted({row.point.seed for row in study.rows if row.point.seed is not None})
    said = f"; calibration seeds {', '.join(map(str, seeds))}" if seeds else ""
    return (
        f"{study.suite}: scores on {count} {scores['split']} samples per task, drift on {drift['samples']} "
        f"{drift['split']} samples{said}; featcal {study.by.get('featcal', '?')}, torch {study.by.get('torch', '?')}"
    )


def _origin(study: Study) -> Origin:
    counts = next(({t: one.n for t, one in row.found.scores.items()} for row in study.rows if row.found.scores), {})
    return Origin(study.suite, study.on["scores"]["split"], counts)
