"""Draw elements that several pages share: selectors, charts with their explanation, empty and failing states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app import drawing, page_end, state
from app.downloads import Numbers
from app.first_page import HOME_SUITE
from app.selection import HOME
from featcal.figures import tables, theme
from featcal.figures.commands import ChartSource, command_lines, python_lines
from featcal.figures.names import plain, plain_lines
from featcal.session.session import Session
from featcal.studies.history import History
from featcal.studies.recording import hash_of
from featcal.suite.views import EvaluationSamples
from featcal.system.errors import FeatcalError
from featcal.system.formatting import message
from featcal.system.resources import embedded_suites

SAMPLE_CHOICES = (16, 32, 64, 128, 256, 512, 1024, 2048)
PLOTLY: dict[str, Any] = {"displaylogo": False, "modeBarButtons": [["toImage"]]}


def suite_selector() -> None:
    """Draw a field for an embedded suite, or for the typed path of a suite file."""
    names, chosen = list(embedded_suites()), state.suite_reference()
    state.control(
        st.selectbox,
        "suite",
        chosen,
        HOME.suite,
        "Suite",
        names if chosen in names else [*names, chosen],
        accept_new_options=True,
        placeholder="an embedded suite, or the path of a suite file",
    )


def show_ignored() -> None:
    """Show the invalid parts of the address."""
    _warn_of_address(state.ignored_parts())


def leave_out_faults(problems: Mapping[str, str], kept: Mapping[str, Any]) -> None:
    """Reset unusable fields to the suite's, with an explanation; the other fields stay."""
    state.leave_fields(problems, kept)
    _warn_of_address([*problems.values()])


def _warn_of_address(sentences: Sequence[str]) -> None:
    for sentence in sentences:
        st.warning(plain_lines(sentence), icon=":material/link_off:")


def open_or_explain(draw_first: Callable[[], None] | None = None) -> Session:
    """Open the selected suite and report parts of the address that it does not have; if it cannot be used, explain why,
    offer the embedded one and end the page.

    Args:
        draw_first: draws what stands above the explanation.
    """
    try:
        session = state.current_session()
    except FeatcalError as error:
        if draw_first is not None:
            draw_first()
        problem(error)
        offer_home()
        page_end.end_page()
    known: dict[str, Sequence[str]] = {"task": session.tasks, "layer": session.family.adapter.layers()}
    if state.selection().run is not None:
        known["run"] = tuple(run.id for run in History().runs(hash_of(session)))
    _warn_of_address([*filter(None, (state.leave_out_unknown(field, names) for field, names in known.items()))])
    return session


def offer_home() -> None:
    """Draw a button back to the embedded suite, unless that is the one that fails."""
    if state.suite_reference() != HOME_SUITE:
        st.button(f"Open {HOME_SUITE} instead", type="primary", on_click=state.look_at, kwargs={"suite": HOME_SUITE})


def task_selector(session: Session, place: DeltaGenerator | None = None, disabled: bool = False) -> str:
    """Draw the choice of a task, at the top of the page by default."""
    task = one_of(session.tasks, state.selection().task)
    draw = partial(state.title_row().selectbox, width=180, label_visibility="collapsed")
    draw = draw if place is None else partial(place.selectbox, width=180)
    state.control(draw, "task", task, session.tasks[0], "Task", session.tasks, disabled=disabled)
    return task


def choice(label: str, options: Sequence[str], field: str, place: DeltaGenerator | None = None) -> str:
    """Draw the choice of one of a few options as a row of buttons, the first by default."""
    chosen = one_of(options, getattr(state.selection(), field))
    draw = (place or st).segmented_control
    state.control(draw, field, chosen, options[0], label, options, required=True)
    return chosen


def one_of(options: Sequence[str], chosen: str | None, default: int = 0) -> str:
    """Return the chosen value, if it is among the options, because other suites or models have others."""
    return chosen if chosen is not None and chosen in options else options[default]


def sample_selector(session: Session) -> EvaluationSamples:
    """Draw the choice of the number of samples per task at the top of the page; a number from an address is limited to
    the size of the split."""
    n = state.selection().n
    if n > max(SAMPLE_CHOICES) and n > (most := max(session.counts(EvaluationSamples(None)).values())):
        sentence = f"The address asks for n = {n}; a task has {most} {session.split} samples, so it is {most}."
        state.clamp("n", n := most, sentence)
        _warn_of_address([sentence])
    draw = partial(state.title_row().selectbox, width=190, label_visibility="collapsed")
    words, offered = f"{session.split} samples per task to measure on", sorted({*SAMPLE_CHOICES, n})
    state.control(draw, "n", n, HOME.n, words, offered, format_func=lambda count: f"{count} samples per task")
    return EvaluationSamples(n)


def tabs(names: Sequence[str], field: str, shown: str | None = None) -> tuple[str, Mapping[str, DeltaGenerator]]:
    """Draw tabs, one of which is opened by a field of the selection (or `shown`); return its name, and all places."""
    shown, key = shown or one_of(names, getattr(state.selection(), field)), f"tabs-{field}"

    def choose() -> None:
        state.look_at(**{field: st.session_state[key]})

    return shown, dict(zip(names, st.tabs(names, default=shown, key=key, on_change=choose), strict=True))


def plotly(name: str) -> dict[str, Any]:
    """Return options for a chart whose camera writes `name`.svg."""
    # SVG: the picture of a chart is for papers, and stays sharp there.
    return {**PLOTLY, "toImageButtonOptions": {"format": "svg", "filename": name}}


def picture(
    figure: go.Figure,
    key: str,
    alt: str,
    name: str,
    place: DeltaGenerator | None = None,
    on_select: Callable[[str], None] | None = None,
) -> DeltaGenerator:
    """Draw only a chart, whose camera writes `name`.svg; a click on a point calls `on_select` with its key. Return its
    place."""
    return drawing.draw_figure(figure, key, alt, plotly(name), place, on_select)


def chart(figure: go.Figure, key: str, alt: str, numbers: Numbers, explanation: str = "") -> None:
    """Draw a chart and, below it, buttons for its explanation, its table and the command that gives its numbers."""
    picture(figure, key, alt, numbers.name)
    tools(numbers, explanation)


def tools(numbers: Numbers, explanation: str = "") -> None:
    """Draw the buttons below a chart: an explanation with formula and caveats, its table, and its command."""
    with st.container(horizontal=True):
        explain(explanation)
        with _tool("Table", "table"):
            _table(numbers)
            _download(numbers)
        _command(numbers)


def explain(explanation: str) -> None:
    """Draw a button for an explanation, with the paper of its propositions and equations."""
    if explanation:
        with _tool("Explain", "help"):
            named = any(word in explanation for word in ("Prop.", "Eq.", "Algorithm"))
            st.markdown(f"{explanation}\n{theme.SOURCE}" if named else explanation)


def show_table(numbers: Numbers, rows: slice | None = None) -> None:
    """Draw a table (some of its rows), the whole of it as CSV, and the command and the Python code that give these
    numbers. Values within noise are grey."""
    _table(numbers, rows)
    csv(numbers)


def csv(numbers: Numbers) -> None:
    """Draw buttons for the whole table as CSV, written on request, and for the commands that give its numbers."""
    with st.container(horizontal=True):
        _download(numbers)
        _command(numbers)


def _table(numbers: Numbers, rows: slice | None = None) -> None:
    frame = tables.lift_halves(numbers.frame if rows is None else numbers.frame[rows], _tenths(numbers))
    shown = frame.style.apply(_fade, axis=None) if "within noise" in frame else frame
    alt = f"The numbers of the chart: {numbers.what}"
    st.dataframe(shown, hide_index=True, column_config=formats(numbers), placeholder="–", alt=alt)


def _tool(label: str, icon: str) -> DeltaGenerator:
    """Draw a small button and return what it opens; its icon is one of Material Symbols."""
    return st.popover(label, icon=f":material/{icon}:", type="tertiary")


def _download(numbers: Numbers) -> None:
    st.download_button(
        "Download CSV",
        numbers.csv,
        f"{numbers.name}.csv",
        "text/csv",
        key=f"csv-{numbers.name}",
        on_click="ignore",
        icon=":material/download:",
        type="tertiary",
    )


def _command(numbers: Numbers) -> None:
    """Draw a button for the command and the Python code that give a table's numbers, if there are any."""
    measured = numbers.measurement(state.suite_reference())
    if measured is not None:
        with _tool("Command", "terminal"):
            show_commands(measured)


def formats(numbers: Numbers) -> dict[str, Any]:
    """Return the display formats of the columns of a table."""
    number, found, tenths = st.column_config.NumberColumn, numbers.frame.select_dtypes("float"), _tenths(numbers)
    forms = {name: number(format=f"%.{1 if name in tenths else numbers.digits}f") for name in found}
    return forms | {name: number(format="%.1e") for name in found if name == "McNemar p"}


def _tenths(numbers: Numbers) -> list[str]:
    """Return the names of a table's columns with one decimal, as on cards."""
    found = numbers.frame.select_dtypes("float")
    return [name for name in found if name.endswith(", %") or (numbers.digits == 1 and name != "McNemar p")]


def show_commands(measured: ChartSource) -> None:
    """Show the command lines and the Python code that give these numbers, for copying."""
    kind, lines = measured.kind, command_lines(measured)
    if lines:
        st.caption(f"On the command line; the numbers are at `{kind.where}` of what it prints:")
        st.code("\n".join(lines), language="bash", wrap_lines=True)
    st.caption("In Python:")
    st.code(python_lines(measured), wrap_lines=True)
    if kind.note:
        st.caption(kind.note)


def _fade(frame: pd.DataFrame) -> pd.DataFrame:
    """Return grey for the difference and its interval in rows that are within noise."""
    styles = pd.DataFrame("", index=frame.index, columns=frame.columns)
    between = frame.columns.get_loc("within noise")
    columns = [name for name in frame.columns[: between + 1] if name in ("from", "to", "McNemar p") or " − " in name]
    styles.loc[frame["within noise"].astype(bool), columns] = "color: #808080"
    return styles


def show_problems(problems: Iterable[str]) -> None:
    """Show problems of the history, or of stored studies."""
    for one in problems:
        st.warning(plain(one), icon=":material/history_toggle_off:")


def problem(error: FeatcalError) -> None:
    """Show one red message with the library's own words."""
    st.error(plain_lines(message(str(error))), icon=":material/error:")


def metrics(values: Sequence[tuple[str, str, str | None]]) -> None:
    """Draw cards with numbers, as many side by side as fit: label, value and a note on it."""
    for column, (name, value, note) in zip(st.columns(len(values)), values, strict=True):
        column.metric(name, value, note, border=True, height="stretch")
