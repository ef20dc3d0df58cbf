"""Determine the needs of a method, besides the models, from a model's name."""

from __future__ import annotations

from collections.abc import Mapping

from featcal.samples.prepare import Modality
from featcal.suite.methods import EXPERT, LABELS, MODULES, NAMED, NEEDS, REFERENCE, SAMPLES, TASK, method
from featcal.suite.name_grammar import model_name

_OWN: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys((*NAMED, REFERENCE), ()),
    "calibrated": (SAMPLES,),
    EXPERT: (MODULES, TASK),
}


def needs(model: str, modality: Modality) -> tuple[str, ...]:
    """Return the needs of a model and of the models that it starts from: some of `NEEDS`, in that order.

    Language models read the answers of calibration samples as tokens, so they need these with the samples; no method
    compares with them. Classifiers of text read none.

    Raises:
        InputError: an invalid name.

    >>> needs("polished:steps=30@calibrated:lam=0.1", "pixels")
    ('samples', 'training')
    >>> needs("expert", "pixels"), needs("expert:digits", "pixels")
    (('modules', 'task'), ())
    """
    found: set[str] = set()
    name: str | None = model
    while name is not None:
        read = model_name(name)
        found |= {*needs_of_kind(REFERENCE if read.task is not None else read.kind)}  # one expert is one checkpoint
        name = read.of
    if SAMPLES in found and modality in ("seq2seq", "causal"):
        found.add(LABELS)
    return tuple(one for one in NEEDS if one in found)


def needs_of_kind(kind: str) -> tuple[str, ...]:
    """Return the needs of the single step that makes a model of this kind."""
    return _OWN[kind] if kind in _OWN else method(kind).about.needs
