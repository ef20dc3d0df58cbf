"""Show the repair in closed form: move a slider, get the exact result, write the checkpoint; or sweep, and compare."""

from app import bench, compare, options, samples, view

session = view.open_or_explain()
on = view.sample_selector(session)
options.chosen_config(session)  # what cannot be used is said here, above everything
compared = compare.choose_to_repair(session)
tab, places = view.tabs(bench.TABS, "bench")
with places[tab]:
    (bench.draw_methods if tab == bench.METHODS else bench.draw_sliders)(session, compared, on)
samples.panel(session, compared.models)
