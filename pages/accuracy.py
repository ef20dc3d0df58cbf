"""Show the final report: what the repair gains on the test set, the scores of all models, and which answers changed."""

import streamlit as st

from app import compare, downloads, flips, jobs, page_end, runs, samples, state, view
from app.downloads import USUAL, Numbers
from featcal.figures import charts, sample_tables, tables
from featcal.suite.views import EvaluationSamples
from featcal.system.errors import FeatcalError
from featcal.system.formatting import how_many

WHOLE = EvaluationSamples(None, "test")

session = view.open_or_explain()
task = view.task_selector(session)
compared = compare.choose_in_sidebar(session, WHOLE)
models = samples.with_ends(session, compared.models)
known = {
    # Other models are scored on demand alone: every score on the test split is a look, and counted.
    shown: model
    for shown, model in models.items()
    if model.name in USUAL or jobs.has_scores_job(session, model, WHOLE)
}
try:
    with runs.count_page_looks(session, known.values(), WHOLE), state.progress() as report:
        found = {shown: jobs.finished_scores(session, model, WHOLE, report) for shown, model in known.items()}
except FeatcalError as error:
    view.problem(error)
    st.page_link("../pages/drift.py", label="Drift needs no answers: go there", icon=":material/bar_chart:")
    page_end.end_page()

scores = {shown: one for shown, one in found.items() if one is not None}
# A job scores the others, or did not end well; what is drawn without them is drawn again when it is done.
if any(model.name in USUAL for shown, model in known.items() if shown not in scores):
    page_end.end_page()
unscored = {shown: model for shown, model in models.items() if shown not in known}
known = {shown: known[shown] for shown in scores}
if unscored and st.button(
    f"Score {' and '.join(unscored)} on the test split",
    type="primary",
    icon=":material/visibility:",
    help="Choose options on validation samples (page Calibrate) and look here once, for the final report.",
):
    with runs.count_page_looks(session, unscored.values(), WHOLE), state.progress() as report:
        for model in unscored.values():
            jobs.finished_scores(session, model, WHOLE, report, at_once=True)
    # What is above is drawn with all models then.
    st.rerun()

pair = compared.pair if compared.pair and {*compared.pair} <= {*scores} else None
frame = tables.score_table(scores, pair)
between = None if pair is None else flips.comparison(session, compared.models, WHOLE)
if between is not None:
    frame = sample_tables.with_intervals(frame, between)
metric = tables.metric_name(scores)
units = (
    f"{metric} in %; difference, from and to in points; gap closed in % of the distance from the merge to the expert"
)
origin = downloads.score_origin(session, scores[compare.SHOWN_EXPERT], known)
measured = Numbers("accuracy", frame, units, origin, 1, "scores")
left, right = st.columns(2) if between is not None else (None, st.container())
if left is not None and pair is not None and between is not None:
    with left:
        flips.show_differences(between, pair, metric, origin)
with right:
    st.header(f"{metric.capitalize()} of every task")
    base = next((shown for shown, model in known.items() if model.name == "base"), None)
    merging = (base, compared.merge) if base not in (None, compared.merge) and compared.merge in scores else None
    dots = charts.score_dots(frame, list(scores), f"{metric}, %", pair or merging)
    summary = tables.describe_ranges({name: frame.set_index("task")[name] for name in scores}, 1)
    alt = f"{metric.capitalize()} on the test split per task and model: {summary}"
    view.picture(dots, "test-scores", alt, measured.name)
    view.tools(measured, charts.ACCURACY_BY_SCORES[session.family.adapter.scores_with])
size = how_many(one.n for one in scores[compare.SHOWN_EXPERT].tasks.values())
how = "Whole generated answers. " if session.is_text else ""
st.caption(f"{size} test samples per task. {how}The test split is for the final report; choose options on validation.")
runs.say_looks(session)
if pair is not None and between is not None:
    with st.expander("Which answers changed?", icon=":material/swap_horiz:"):
        flips.show_flips(session, compared.models, task, WHOLE, between)
samples.panel(session, compared.models, details=True)
