"""The final report: scores of base, merged, calibrated model and experts on the test split, and what flipped."""

import streamlit as st

from app import downloads, flips, jobs, options, state, stopped, view
from app.downloads import Numbers
from featcal.errors import FeatcalError
from featcal.figures import charts, tables, text
from featcal.progress import silent
from featcal.views import View
from featcal.words import percent

WHOLE = View(None, "test")

st.header("What is it worth on the test split?")
session = view.open_or_explain()
task = view.task_selector(session)
config = options.in_sidebar(session)
models = {"base": "base", "merged": "merged", "expert": "expert"}
try:
    with state.progress() as report:
        found = {name: jobs.scores(session, model, WHOLE, report) for name, model in models.items()}
except FeatcalError as error:
    view.problem(error)
    st.page_link("../pages/drift.py", label="Drift needs no answers: go there", icon=":material/stacked_bar_chart:")
    stopped.end_page()

scores = {name: one for name, one in found.items() if one is not None}
if len(scores) < len(models):
    stopped.end_page()
if config is None:
    options.offer(session, "Base, merged model and experts are shown; a calibration adds its own bars.")
elif not jobs.asked_for_scores(session, config, WHOLE):
    if st.button(
        "Score the calibrated model on the test split",
        type="primary",
        icon=":material/visibility:",
        help="Choose options on validation samples (page Calibrate) and look here once, for the final report.",
    ):
        with state.progress() as report:
            jobs.scores(session, config, WHOLE, report, at_once=True)
        st.rerun()
elif (calibrated := jobs.scores(session, config, WHOLE, silent)) is not None:
    scores = {"base": scores["base"], "merged": scores["merged"], "calibrated": calibrated} | scores

frame = tables.score_table(scores)
average = frame.iloc[-1]
metric = tables.metric_name(scores)
numbers = [(f"average, {name}", f"{percent(average[name] / 100)} %", None) for name in scores]
if "calibrated" in scores:
    gap = average["gap closed, %"]
    numbers[2] = (*numbers[2][:2], f"{average['calibrated − merged']:+.1f} points")
    numbers.append(("gap to the experts closed", "–" if gap != gap else f"{gap:.0f} %", None))
view.metrics(numbers)
units = f"{metric} in %; difference in points; gap closed in % of the distance from merged model to expert"
origin = downloads.of_scores(session, scores["merged"], config if "calibrated" in scores else None)
measured = Numbers("accuracy", frame, units, origin, 1)
bars = charts.score_bars(frame, list(scores), f"{metric}, %")
said = tables.spoken({name: frame.set_index("task")[name] for name in scores}, 1)
alt = f"{metric.capitalize()} on the test split per task and model: {said}"
view.picture(bars, "test-scores", alt, measured.name)
size = tables.how_many(one.n for one in scores["merged"].tasks.values())
how = "Whole generated answers. " if session.is_text else ""
st.caption(
    f"{size} test samples per task. {how}The test split is for the final report; options are chosen on validation."
)
view.explain(text.ACCURACY_OF_TEXT if session.is_text else text.ACCURACY)
view.table(measured, slice(None, -1))  # sorting a column must not carry the average among the tasks
if "calibrated" in scores:
    flips.section(session, scores["merged"], scores["calibrated"], task, origin)
