"""Open the app: summarise the measurements of the merge in sentences, with the next step."""

from app import check, compare, samples, verdict, view

session = view.open_or_explain()
on = view.sample_selector(session)
compared = compare.choose_models(session)
check.draw_field()
verdict.draw_verdict(session, compared, on)
samples.panel(session, compared.models)
