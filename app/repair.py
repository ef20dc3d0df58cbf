"""Draw the Calibrate page around its exact result: a block's preview before it, and further evaluations after it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import pandas as pd
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app import cockpit, downloads, jobs, on_table, state, view
from app.compare import Compared
from app.downloads import Numbers
from featcal.calibration.block_statistics import corners
from featcal.drift.ledger import DriftLedger, Features
from featcal.figures import repair_charts, repair_tables, tables, theme
from featcal.figures.names import plain
from featcal.figures.theme import Shown
from featcal.session.model_ref import ModelRef
from featcal.session.session import Session
from featcal.suite.name_grammar import name_on
from featcal.suite.views import DriftOptions, EvaluationSamples
from featcal.system.errors import FeatcalError, InputError
from featcal.system.formatting import decimals, exactly, percent, points

SEEDS = 3
"""Number of calibrations for the spread over seeds: the chosen seed and the next ones."""
QUICK = 60.0
"""Most seconds, by an estimate, in which the next preview is prepared; a move of a control ends that."""
_EXACT = "exact run"
_CHANGE = "before, after, change: drift / norm of the expert's feature"


@dataclass(frozen=True)
class Previewed:
    """The preview of one block, as shown before the exact run."""

    layer: str
    chart: DeltaGenerator | None = None
    """The chart with the preview."""
    words: DeltaGenerator | None = None


def preview(session: Session, on: EvaluationSamples, chart: DeltaGenerator, words: DeltaGenerator) -> Previewed:
    """Show a preview of the first calibrated block with the current options.

    No calibrated block comes before it, so for recipes that solve a block at once the preview equals the exact result.
    For the last block of clip-mini, whose inputs change too, it was a fifth of the change, or of the wrong sign.

    Args:
        chart: place of the last result, in which the preview is a point.
        words: place of the sentence on the preview.
    """
    model = on_table.find_calibration(session)
    config, of = model.require_calibration()
    layer = next(one for one in session.family.adapter.block_layers() if config.blocks is None or one in config.blocks)
    shown, (suite, last) = Previewed(layer), st.session_state.get(_EXACT, ("", model))
    exact, start = last.require_calibration()
    # What was kept says nothing of another merge.
    if suite != state.suite_reference() or exact == config or start.key != of.key:
        return shown
    try:
        if not session.fit.has_preview(last, layer, on):
            return shown
        held = session.fit.preview(last, layer, on)
        found = held.solve(config)
    except FeatcalError:  # with other samples or switches nothing was kept that fits
        return shown
    before, now = _mean(held.reached), _mean(found.drift)
    place = cockpit.preview_chart(chart, on, last, layer, now)
    caption = words.caption(
        f"{plain(layer)}: relative drift {before:.4f} → {now:.4f}. The other blocks are being computed."
    )
    return Previewed(layer, place, caption)


def confirm(shown: Previewed, session: Session, model: ModelRef, words: DeltaGenerator) -> None:
    """Replace the sentence on the preview by one on the exact run."""
    if model.require_calibration()[0].decisions:
        how = "With δ above 0 there is no preview before the exact run."
    elif not _is_quick(session, model):
        how = f"This exact run has no preview before it: preparing one would take more than {QUICK:g} s."
    else:
        how = f"While the exact run computes, {plain(shown.layer)} comes first, as a point in the chart."
    (shown.words or words).caption(how)


def keep_block_preview(layer: str, session: Session, model: ModelRef, on: EvaluationSamples) -> None:
    """Precompute the block statistics so that the next slider move previews instantly."""
    if not _is_quick(session, model):
        return
    place = st.empty()

    def ends_if_moved(label: str, done: int, total: int) -> None:
        place.empty()  # drawing is where streamlit raises its signal to end a run, so a move ends this within a block

    with suppress(InputError):  # these options leave the block as merged
        session.fit.preview(model, layer, on, ends_if_moved)
    st.session_state[_EXACT] = state.suite_reference(), model


def _is_quick(session: Session, model: ModelRef) -> bool:
    """Say whether a preview is prepared quickly enough: its block is walked once for the exact run's options and once
    for each of the corners between which it solves."""
    config, _ = model.require_calibration()
    blocks, total = len(session.family.adapter.blocks()), session.fit.calibrate(model).record["seconds"]["total"]
    return float(total) * (1 + len(corners(config))) / blocks <= QUICK


def where_it_helps(
    session: Session, compared: Compared, features: Mapping[str, Features], on: EvaluationSamples
) -> None:
    """Show the change of drift by block and task and, on request, of the attribution to each layer."""
    (a, before), (b, after) = features.items()
    origin = downloads.sample_origin(session, on, compared.models)
    _changes(repair_tables.drift_change(before, after), "change of drift", f"drift, {b} − {a}", origin)
    booked = state.selection().booked
    label = "Also show the change in drift attributed to each layer (Prop. 2; slower)"
    state.control(st.toggle, "booked", booked, False, label)
    if booked:
        asked = DriftOptions(on.samples, on.split, on.seed, attribution=True)
        with state.progress() as report:
            ledgers: list[DriftLedger] = [
                session.measure.drift(model, asked, report) for model in compared.models.values()
            ]
        frame = repair_tables.contribution_change(ledgers[0], ledgers[1])
        _changes(frame, "change of attribution", f"booked drift, {b} − {a}", origin)


def anchor_only(session: Session, compared: Compared, features: Mapping[str, Features], on: EvaluationSamples) -> None:
    """Show the anchor without any samples next to the result, so that its effect is not credited to the method."""
    (a, first), (b, second) = compared.models.items()
    rho = exactly(second.require_calibration()[0].rho)
    name = name_on(f"anchor:rho={rho}", first.name)
    shown = Shown(f"anchor only, rho {rho}", "merged", True)
    models = {a: first, shown: session.resolve(name), b: second}
    with state.progress() as report:
        measured = {a: features[a], shown: session.measure.features(name, on, report), b: features[b]}
    scores, _ = state.answer_scores(session, models, on)
    frame = repair_tables.model_summary(measured, scores)
    metric = tables.metric_name(scores) if scores else ""
    if scores:
        merged, anchor, calibrated = (scores[name].average for name in models)
        st.caption(
            f"Average {metric}, from {a} at {percent(merged)}\u00a0%: the anchor alone {points(anchor - merged)} "
            f"points, the data on top of it {points(calibrated - anchor)}, both together "
            f"{points(calibrated - merged)} points."
        )
    units = (
        f"final drift: norm / norm of the expert's, mean over tasks; cosine to the experts; score: {metric or 'none'}"
    )
    origin = downloads.sample_origin(session, on, models)
    kind = state.kind_of_chart(session, on, "gains") if scores else "drift"
    view.show_table(Numbers("anchor only", frame, units, origin, kind=kind))
    view.explain(repair_charts.ANCHOR_ONLY)


def show_spread(session: Session, model: ModelRef, on: EvaluationSamples) -> None:
    """Show mean and range of every score over calibrations that differ only in their seed, on request."""
    config, of = model.require_calibration()
    wanted = state.selection().spread
    state.control(st.toggle, "spread", wanted, False, f"Calibrate with {SEEDS} seeds and show the spread")
    if not wanted:
        return
    drawn = [config.seed + more for more in range(SEEDS)]
    seeds = {seed: session.resolve(replace(config, seed=seed), of) for seed in drawn}
    with state.progress() as report:
        for one in seeds.values():
            jobs.ensure_calibrated(session, one, report)
            session.measure.features(one, on, report)
    scores, missing = state.answer_scores(session, {str(n): one for n, one in seeds.items()}, on)
    if not scores:
        st.info(f"No scores here: {plain(missing)}", icon=":material/info:")
        return
    frame = repair_tables.spread_table({int(seed): one for seed, one in scores.items()})
    metric = tables.metric_name(scores)
    average = frame.set_index("task").loc["average"]
    models = {f"seed {seed}": one for seed, one in seeds.items()}
    view.chart(
        repair_charts.spread_bars(frame, f"{metric}, %"),
        "spread-chart",
        f"{metric.capitalize()} over {SEEDS} seeds: average {decimals(average['lowest'], 1)} to "
        f"{decimals(average['highest'], 1)}",
        Numbers(
            "spread over seeds",
            frame,
            f"{metric} in %; range in points",
            downloads.sample_origin(session, on, models),
            1,
            state.kind_of_chart(session, on, "decisions"),
        ),
        repair_charts.SPREAD,
    )


def show_conditioning(session: Session, model: ModelRef) -> None:
    """Show the condition of every linear system, in a closed section and measured on request."""
    wanted = state.selection().conditioning
    state.control(st.toggle, "conditioning", wanted, False, "Measure the eigenvalues of every left matrix")
    if not wanted:
        return
    with state.progress() as report:
        found = session.fit.conditioning(model, report)
    frame = repair_tables.conditioning_table(found)
    worst = frame.loc[frame["condition"].idxmax()]
    st.caption(
        f"Largest ratio of eigenvalues: {worst['condition']:.3g}, {plain(worst['layer'])}, {plain(worst['maps'])}."
    )
    origin = downloads.sample_origin(session, downloads.samples_of_calibration(model), {"calibrated": model})
    view.show_table(
        Numbers("conditioning", frame, "eigenvalues of Eq. 17's left matrix; counts", origin, 4, "conditioning")
    )
    st.markdown(f"{repair_charts.CONDITIONING}\n{theme.SOURCE}")


def _changes(frame: pd.DataFrame, what: str, unit: str, origin: downloads.Origin) -> None:
    ends = [frame.loc[frame["change"].idxmin()], frame.loc[frame["change"].idxmax()]]
    summary = " to ".join(f"{one['change']:+.3f} ({one['task']}, {one['layer']})" for one in ends)
    view.chart(
        repair_charts.change_map(frame, unit),
        what.replace(" ", "-"),
        f"{what.capitalize()} by task and layer, {summary}",
        Numbers(what, frame, _CHANGE, origin, kind="attribution" if "attribution" in what else "drift"),
        repair_charts.WHERE_IT_HELPS,
    )


def _mean(drift: Mapping[str, float]) -> float:
    return sum(drift.values()) / len(drift)
