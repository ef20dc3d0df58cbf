"""List all runs, by hand and by sweeps, as lines across options and as a table, and the written models."""

from app import checkpoints, compare, runs, sweep, view
from featcal.studies.history import History
from featcal.studies.recording import hash_of
from featcal.studies.sweep import comparable_points

session = view.open_or_explain()
on = view.sample_selector(session)
compare.choose_models(session)
history = History()
if points := comparable_points(session, on, history.runs(hash_of(session))):
    sweep.draw_lines(session, on, points)
runs.show_runs(session, history, is_filtered=bool(points))
checkpoints.show_checkpoints(session, on)
