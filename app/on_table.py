"""Find the merge under repair, and its repair, to which the name "calibrated" refers on every page."""

from __future__ import annotations

from app import options, state
from app.selection import CALIBRATED, NOTHING
from featcal.figures.verdict.measure import is_repairable
from featcal.models.model import tasks_with_own_modules
from featcal.session.model_ref import MERGED, ModelRef
from featcal.session.session import Session
from featcal.suite.name_grammar import model_name

_WHY = {
    "base": "is what the experts were fine-tuned from",
    "expert": "is an expert",
    "anchor": "is the anchor of a calibration, without the data",
}
"""Reasons why models of these kinds cannot be calibrated; others are already calibrated."""


def find_calibration(session: Session) -> ModelRef:
    """Return the merge under repair, calibrated with the chosen options.

    Raises:
        InputError: as `find_merge`.
    """
    return session.resolve(options.chosen_config(session), find_merge(session))


def find_merge(session: Session) -> ModelRef:
    """Return the merge under repair: the subject if it can be calibrated, else the merge from which the subject was
    made; else the compared model or the merge from which that was made; else the suite's own.

    Raises:
        InputError: an unknown name.
    """
    return merge_of(session, state.selection().merge, state.selection().beside)


def merge_of(session: Session, *names: str | None) -> ModelRef:
    """Return the first merge among models and the models from which they were made; the suite's own if there is none.

    Raises:
        InputError: an unknown name.
    """
    for name in names:
        model = None if name is None or name in (CALIBRATED, NOTHING) else session.resolve(name)
        while model is not None:
            if not why_not(session, model):
                return model
            made = session.fit.find_calibration(model)
            model = model.of if made is None else made[1]
    return MERGED


def why_not(session: Session, model: ModelRef) -> str:
    """Explain why a model cannot be calibrated; "" if it can.

    Raises:
        InputError: an unknown name.
    """
    if not is_repairable(model):
        return _WHY.get(model.kind, "is calibrated already")
    if model.kind != MERGED.kind and tasks_with_own_modules(session.fit.weights(model)):
        return "is more than its weights"
    return ""


def fields_beside_merge(name: str) -> dict[str, str]:
    """Return the fields of the selection that compare the merge with a model, and a
    calibration with the model before it.
    """
    parts = model_name(name)
    return {"beside": name, **({"merge": parts.of} if parts.kind == "calibrated" and parts.of is not None else {})}
