"""List what was tried, by hand and by sweeps: mean against worst task, every run, and what was written."""

from app import checkpoints, compare, runs, sweep, view
from featcal.studies.history import History

session = view.open_or_explain()
on = view.sample_selector(session)
compared = compare.choose(session)
history = History()
sweep.section(session, on, history, compared.models)
runs.section(session, history)
checkpoints.section(session, on)
