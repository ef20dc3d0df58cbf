"""Show the repair in closed form: move a slider, get the exact result, write the checkpoint."""

from functools import partial

import streamlit as st

from app import (
    afterwards,
    cockpit,
    compare,
    downloads,
    export,
    good_options,
    options,
    repair,
    runs,
    samples,
    state,
    undo,
    view,
)
from app.downloads import Numbers
from featcal.figures import charts, tables, text
from featcal.figures.names import plain
from featcal.session.model_ref import EVERY_EXPERT

st.title("Repair it in closed form")
session = view.open_or_explain()
on = view.sample_selector(session)
options.chosen_config(session)  # what cannot be used is said here, above everything
merge = compare.choose_merge(session)
window = st.container(key="cockpit")
trail = window.container(horizontal=True, key="trail")
result = window.container()
controls, drift_place, score_place = window.columns([4, 5, 5])
with controls:
    more, recipes = options.controls_on_page(session)
undo.buttons(trail, session)
drift_place.header("Drift per layer")
words = window.container(key="block-preview")
previewed = repair.preview(session, on, more, drift_place, words)
compared = compare.with_calibrated(session, merge)
(a, before_model), (b, model) = compared.models.items()
config, _ = model.require_calibration()  # that of the controls
with state.progress() as report:
    before, after = session.measure.features(before_model, on, report), session.measure.features(model, on, report)
# Once the exact run is done, the preview is held against it.
repair.confirm(previewed, session, model, after, more, words)
shown = {**compared.models, compare.SHOWN_EXPERT: EVERY_EXPERT}
scores, missing = state.answer_scores(session, shown, on)
runs.keep(session, compared.models, on)
features = {a: before, b: after}
measured_on = on, state.kind_of_scores(session, on) if scores else "cosine", state.opened_files()[1]
undo.chips(trail, session, model, measured_on, cockpit.score_of(after, scores.get(b)))
if scores:
    cockpit.recipe_scores(recipes, session, model, on)
more.markdown(f"**Why these defaults**  \n{options.defaults_explained(session, config)}")
good = cockpit.result(result, session, model, features, scores)
origin = downloads.sample_origin(session, on, compared.models)
drifts = {a: tables.relative_drift(before), b: tables.relative_drift(after)}
frame, units = tables.layer_columns(drifts), "norm / norm of the expert's"
numbers = Numbers("drift before and after", frame, units, origin, kind="drift")
cockpit.drift_chart(previewed.chart or drift_place, on, model, drifts, numbers)
with drift_place:
    view.tools(numbers, f"{text.CALIBRATE}\n*The preview of one block.*\n{text.PREVIEW}")
with score_place:
    if scores:
        metric, kind = tables.metric_name(scores), state.kind_of_chart(session, on, "decisions")
        st.header(f"{metric.capitalize()} per task")
        frame = tables.score_table(scores, (a, b))
        ranges = tables.describe_ranges({name: frame.set_index("task")[name] for name in scores}, 1)
        view.chart(
            charts.score_bars(frame, list(scores), f"{metric}, %").update_layout(height=cockpit.HEIGHT),
            "quick",
            f"{metric.capitalize()} per task before and after: {ranges}",
            numbers=Numbers(
                "scores before and after",
                frame,
                f"{metric} in %; difference in points",
                # `featcal drift --output` gives the experts' scores by itself, `featcal evaluate` when they are named.
                downloads.sample_origin(session, on, shown) if kind == "scores" else origin,
                1,
                kind,
            ),
        )
    else:
        st.header("Scores per task")
        st.info(f"No scores here: {plain(missing)}", icon=":material/info:")
sentence = (
    f"Measured on {tables.describe_samples(before)}, which calibration does not see. Choose options here, not on test."
    if session.split == "validation"
    else f"This suite has no validation split: measured on {tables.describe_samples(before)}, so it flatters."
)
st.caption(f"{sentence} Calibrated in {session.fit.calibrate(model).record['seconds']['total']:.2f} s.")
fewer = {task: one["samples"] for task, one in session.fit.calibrate(model).record["tasks"].items()}
fewer = {task: count for task, count in fewer.items() if count < config.samples}
if fewer:
    counts = ", ".join(f"{plain(task)} {count}" for task, count in fewer.items())
    st.caption(f"Fewer calibration samples than the {config.samples} asked for: {counts}.")
worse = tables.raised_tasks(before, after)
if worse:
    tasks = ", ".join(map(plain, worse))
    st.warning(
        f"These options raise the final drift of {tasks}. Try another λ or ρ, or more samples.",
        icon=":material/trending_up:",
    )
if scores and session.is_text and state.kind_of_scores(session, on) == "features":
    st.caption(
        "First-token accuracy: how often the first token of the answer is right, read off the final features, since "
        "whole answers of this suite take long. It can be right where the answer is wrong: the Accuracy page scores "
        "whole answers."
    )
export.section(session, model)
undo.listen()
with good:
    good_options.section(session, model)

where, anchor, seeds, solves = st.tabs(
    ["Where does it help?", "The anchor alone", "Draw of samples", "Conditioning"], key="more-of-it"
)
with where:
    repair.where_it_helps(session, compared, features, on)
with anchor:
    # Nobody waits for these, so the browser asks for them once the exact charts stand.
    afterwards.draw_later(
        "the rest",
        repr((state.reference(), compared, previewed.layer, on)),
        "The anchor alone is being measured …",
        partial(repair.rest, session, compared, features, on, previewed.layer),
    )
with seeds:
    repair.spread(session, model, on)
with solves:
    repair.conditioning(session, model)
samples.panel(session, compared.models)
