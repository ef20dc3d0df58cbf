"""Open the app: summarise the measurements of the merge in sentences, with the next step."""

from app import check, compare, samples, verdict, view

session = view.open_or_explain(check.draw_beside_error)
on = view.sample_selector(session)
compared = compare.adopt_models(session, compare.choose_models(session))
check.draw_field()
verdict.draw_verdict(session, compared, on)
samples.panel(session, compared.models)
