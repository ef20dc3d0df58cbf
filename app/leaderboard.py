"""Show method tables on a page: of the selected suite, across suites, and the paper's own."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import pandas as pd
import streamlit as st

from app import jobs, on_table, state, view
from app.downloads import Numbers, Origin
from featcal.figures import study_charts, study_tables, tables, theme
from featcal.figures.names import plain, short_model, shorten_models
from featcal.samples.sources import preview_samples
from featcal.studies import library
from featcal.studies.corrupt import CLEAN, corrupt_suite
from featcal.studies.history import suite_hash
from featcal.studies.library import TABLE
from featcal.studies.paper import PaperTable, paper_tables
from featcal.studies.plan import SAMPLES, SEEDS
from featcal.studies.study import Study
from featcal.suite.methods import EXPERT, NEEDS
from featcal.suite.name_grammar import model_name
from featcal.system.formatting import duration, join_words

MOST_TASKS = 6
"""Largest number of tasks whose pictures are shown."""
_LONG = (
    "Every method at its defaults with three seeds (AdaMerging with 200 steps and one seed, Fisher merging with one), "
    "as a background job: minutes for a small suite, hours for a large one. It continues when you close this page, and "
    "finished rows are kept if it is cancelled."
)
SUBJECT, BESIDE = "the merge under repair", "compared with the merge"
_ROWS, _LISTED, _AS = "leaderboard-rows", "leaderboard-listed", "leaderboard-as"
HIDDEN = ("seeds", "wall s", "failure")
"""Columns of the method table that only the download has."""
SCORES = ("average", "normalised", "worst")
"""Columns of the method table in per cent."""


def find_studies() -> list[Study]:
    """Return the studies of the selected suite, tables of methods first; report files that are not studies, and why."""
    own, problems = library.own()
    view.show_problems(problems)
    return library.studies_of_suite(state.suite_reference(), suite_hash(state.opened_files()[0]), own)


def show_leaderboard(of_suite: Sequence[Study]) -> None:
    """Show the measurements of the selected suite, of all suites side by side, and the paper's printed ones."""
    methods, suites, printed = st.tabs(["Methods", "Every suite", "The paper's tables"])
    with methods:
        if of_suite:
            _table(_choose(of_suite))
        else:
            what = "Nothing of this suite was measured yet; the button below measures it."
            st.info(what, icon=":material/leaderboard:")
        _measure(of_suite)
    with suites:
        _suites([study for study in [*library.own()[0], *library.shipped_studies()] if study.kind == TABLE])
    with printed:
        _paper()


def _choose(studies: Sequence[Study]) -> Study:
    """Draw the choice of one of several studies of a suite, tables of methods first and the newest first."""
    if len(studies) == 1:
        st.caption(plain(_describe(studies[0])))
        return studies[0]
    names = [
        f"{number + 1}: {library.KINDS.get(one.kind, one.kind)}, {_describe(one)}" for number, one in enumerate(studies)
    ]
    picked = st.selectbox("Study", range(len(names)), format_func=lambda number: names[number], key="which-table")
    return studies[picked]


def _table(study: Study) -> None:
    """Draw the table of one study; a click on a row shows its model on all pages."""
    summaries = study.summaries()
    frame = study_tables.method_table(summaries)
    if study.kind == "corrupt":
        _show_corrupted(study)
    _draw_places(study, frame)
    ranked = _rank(frame)
    order = pd.concat([ranked, frame[frame["average"].isna()]]) if study.kind == TABLE else frame
    # Rows of the selection are numbers in the table as it was drawn, which may not be the table of the next run.
    listed = [summaries[place].model for place in order.index]
    st.session_state[_LISTED] = listed
    with st.container(horizontal=True, vertical_alignment="center"):
        st.caption("Click a row to show that model on all pages; it is fitted when needed.")
        st.segmented_control("The clicked model is", [BESIDE, SUBJECT], default=BESIDE, required=True, key=_AS)
    numbers = _numbers(study, frame)
    st.dataframe(
        tables.lift_halves(order.drop(columns=list(HIDDEN)), SCORES).assign(method=shorten_models(order["method"])),
        hide_index=True,
        key=_ROWS,
        on_select=_choose_row,
        selection_mode="single-row",
        column_config={**view.formats(numbers), **_widths(order)},
        placeholder=study_tables.NOTHING,
        alt=f"{len(frame)} methods: score, cost and what each needs",
    )
    for row in frame[frame["failure"] != ""].to_dict("records"):
        st.caption(plain(f"{short_model(row['method'])}: {row['failure']}"))
    view.explain(study_charts.LEADERBOARD)
    view.csv(numbers)


def _choose_row() -> None:
    rows = st.session_state[_ROWS].selection.rows
    model = st.session_state[_LISTED][rows[0]] if rows else EXPERT
    if model != EXPERT:  # every page has them beside its models already
        as_merge = st.session_state[_AS] == SUBJECT
        state.look_at(**({"merge": model} if as_merge else on_table.fields_beside_merge(model)))


def _rank(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[frame["average"].notna()].sort_values("average", ascending=False, kind="stable")


def _numbers(study: Study, frame: pd.DataFrame) -> Numbers:
    return Numbers(study.kind, frame, "scores in %; drift: norm / norm of the expert's", _origin(study), digits=2)


def _draw_places(study: Study, frame: pd.DataFrame) -> None:
    """Draw the methods of a study at every place of it; nothing for a table of methods, which has one place."""
    if places := list(dict.fromkeys(name for row in study.rows for name in row.point.at)):
        alt = f"Average score of {len(frame)} rows over {', '.join(places)}"
        name = _numbers(study, frame).name
        view.picture(study_charts.place_lines(frame, places), "leaderboard", alt, name)


def _show_corrupted(study: Study) -> None:
    """Show one calibration picture of some tasks at every place of the study, as in the models' inputs."""
    suite, _ = state.opened_files()
    places = dict.fromkeys((str(row.point.at["corruption"]), int(row.point.at["severity"])) for row in study.rows)
    with st.expander("What the pictures look like", icon=":material/image:"):
        for kind, severity in places:
            shown = suite if kind == CLEAN else corrupt_suite(suite, kind, severity)
            drawn = [
                (task, preview_samples(shown, task, "calibration", 1, SEEDS[0]))
                for task in list(suite.tasks)[:MOST_TASKS]
            ]
            st.caption(kind if kind == CLEAN else f"{kind}, severity {severity}")
            seen = [(task, one.images[0]) for task, one in drawn if one.images]
            names = [task for task, _ in seen]
            alt = [f"{task}, {kind}, severity {severity}" for task in names]
            st.image([image for _, image in seen], caption=[plain(name) for name in names], width=96, alt=alt)


def _widths(frame: pd.DataFrame) -> dict[str, Any]:
    number = st.column_config.NumberColumn
    return {
        "method": st.column_config.TextColumn(width="large", pinned=True),
        **{name: number(format="%.1f") for name in (*SCORES, "CPU s")},
        "interval": number("± (95 %)", format="± %.1f"),
        "MB": number(format="%.0f"),
        **{name: st.column_config.CheckboxColumn(width="small") for name in NEEDS if name in frame},
    }


def _suites(studies: Sequence[Study]) -> None:
    """Show every method against every suite."""
    if not studies:
        st.info("No table was measured yet.", icon=":material/leaderboard:")
        return
    frame = study_tables.across_suites(studies)
    st.caption("Score as a share of the experts', mean over tasks, in %: the one number that suites have in common.")
    form = st.column_config.NumberColumn(format="%.1f")
    st.dataframe(
        tables.lift_halves(frame, frame.columns.drop("method")),
        hide_index=True,
        column_config={name: form for name in frame.columns if name != "method"},
        placeholder=study_tables.NOTHING,
        alt=f"{len(frame)} methods on {len(frame.columns) - 1} suites",
    )


def _paper() -> None:
    """Show the paper's tables as printed, with misprints marked."""
    papers, here = paper_tables(), state.suite_reference()
    own = next((number for number, one in enumerate(papers) if here in one.suites.values()), 0)
    picked = st.selectbox(
        "Table of the paper", range(len(papers)), own, format_func=lambda number: papers[number].name, key="paper-table"
    )
    table: PaperTable = papers[picked]
    st.caption(
        f"The numbers of the [paper]({theme.PAPER}), not measured here: other models, data and machines than the toy "
        f"suites'. {table.note}"
    )
    frame = study_tables.paper_table(table)
    form = st.column_config.NumberColumn(format="%.1f")
    printed = dict.fromkeys(frame.select_dtypes("float").columns.drop("mean of the cells", errors="ignore"), form)
    alt = f"{table.name}, {len(frame)} rows as printed"
    st.dataframe(frame, hide_index=True, column_config=printed, alt=alt)


def _measure(before: Sequence[Study]) -> None:
    """Show the cost of measuring every method, as far as it is known from `before`, the button that does it in a
    separate process, and the equivalent command."""
    seeds = ",".join(map(str, SEEDS))
    command = [
        "featcal",
        "compare",
        state.suite_reference(),
        "--model",
        "all",
        "--samples",
        str(SAMPLES),
        "--seeds",
        seeds,
    ]
    with st.container(horizontal=True):
        with st.popover("Measure every method", icon=":material/leaderboard:"):
            st.markdown(" ".join([_LONG, *(_took(study) for study in before[:1] if study.kind == TABLE)]))
            wanted = st.button("Start", type="primary", icon=":material/play_arrow:", key="measure-every-method")
        with st.popover("Command", icon=":material/terminal:"):
            st.caption(
                "The command continues where it stopped, and this page shows its result. "
                "You can name methods instead of all."
            )
            st.code(shlex.join(command), language="bash", wrap_lines=True)
    args = {"methods": ["all"], "seeds": list(SEEDS), "samples": SAMPLES}
    if wanted or jobs.has_job("compare", args):
        jobs.follow_jobs("compare", args, wanted)


def _took(study: Study) -> str:
    """Describe the time that a table took."""
    seconds = sum(spent.wall for row in study.rows for spent in row.found.seconds.values())
    return f"The table above took {duration(seconds)} for {len(study.rows)} models, where it was measured."


def _describe(study: Study) -> str:
    """Describe in words the samples of a study."""
    scores, drift = study.on["scores"], study.on["drift"]
    count = "all" if scores["samples"] is None else str(scores["samples"])
    options = [dict(model_name(row.point.model).options) for row in study.rows]
    drawn = sorted({int(one["samples"]) for one in options if "samples" in one})
    seeds = sorted({row.point.seed for row in study.rows if row.point.seed is not None})
    note = f"; {join_words([*map(str, drawn)])} calibration samples per task" if drawn else ""
    note += f"; calibration seeds {', '.join(map(str, seeds))}" if seeds else ""
    return (
        f"{study.suite}: scores on {count} {scores['split']} samples per task, drift on {drift['samples']} "
        f"{drift['split']} samples{note}; featcal {study.by.get('featcal', '?')}, torch {study.by.get('torch', '?')}"
    )


def _origin(study: Study) -> Origin:
    counts = next(({t: one.n for t, one in row.found.scores.items()} for row in study.rows if row.found.scores), {})
    return Origin(study.suite, study.on["scores"]["split"], counts)
