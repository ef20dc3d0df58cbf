"""What a method needs beside the models: told by the name of a model alone."""

from __future__ import annotations

from collections.abc import Mapping

from featcal.samples.prepare import Modality
from featcal.suite.name_grammar import REFERENCE, model_name
from featcal.suite.recipe import METHODS

SAMPLES, LABELS, TEST_DATA, TRAINING, MODULES, TASK = NEEDS = (
    "samples",
    "labels",
    "test data",
    "training",
    "modules",
    "task",
)
"""Calibration samples; their labels, or answers that are read as tokens; samples of the test split; steps of gradient
descent; modules or whole models per task; the task of a sample known when the model is used."""
_SEES = dict.fromkeys(("calibrated", "regmean", "regmean++", "lot", "esm", "coefficients", "fisher"), (SAMPLES,))
_TRAINS = {
    "wudi": (TRAINING,),
    **dict.fromkeys(("polished", "adamerging"), (SAMPLES, TRAINING)),
    "adamerging-test": (TEST_DATA, TRAINING),
}
_PER_TASK = {
    **dict.fromkeys(("surgery", "probsurgery"), (SAMPLES, TRAINING, MODULES, TASK)),
    "react": (SAMPLES, MODULES, TASK),
}
_NOTHING: Mapping[str, tuple[str, ...]] = dict.fromkeys((*METHODS, "base", "merged", "anchor", "svc", REFERENCE), ())
OF_A_KIND: Mapping[str, tuple[str, ...]] = {**_NOTHING, **_SEES, **_TRAINS, **_PER_TASK, "expert": (MODULES, TASK)}
"""Kind of a model's name → what its own step needs."""


def needs(model: str, modality: Modality) -> tuple[str, ...]:
    """What a model needs, with what it is made of: some of `NEEDS`, in that order.

    Language models read the answers of calibration samples as tokens, so where samples are needed these are too; no
    method compares with them. Classifiers of text read none.

    Raises:
        InputError: a name that cannot be read.

    >>> needs("polished:steps=30@calibrated:lam=0.1", "pixels")
    ('samples', 'training')
    >>> needs("expert", "pixels"), needs("expert:digits", "pixels")
    (('modules', 'task'), ())
    """
    found: set[str] = set()
    name: str | None = model
    while name is not None:
        read = model_name(name)
        found |= {*OF_A_KIND[REFERENCE if read.task is not None else read.kind]}  # one expert is one checkpoint
        name = read.of
    if SAMPLES in found and modality in ("seq2seq", "causal"):
        found.add(LABELS)
    return tuple(one for one in NEEDS if one in found)
