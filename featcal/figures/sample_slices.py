"""Select samples of a task by their right answer, by the models' answers, or by a low margin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from featcal.evaluation.comparison import BROKEN, FIXED
from featcal.figures.sample_tables import PerSample

Mask = NDArray[np.bool_]
"""`[n]`: mask of the samples of a task."""
LOWEST = {"lowest half": 0.5, "lowest quarter": 0.25, "lowest tenth": 0.1}
"""Choices of low margins → their share of a task's samples."""


def mask_answers(found: Mapping[str, PerSample], models: Sequence[str]) -> dict[str, Mask]:
    """Return, by a description in words, masks of samples by the answers of one or two models; models without scores
    are ignored.

    >>> found = {"a": PerSample(right=(True, False)), "b": PerSample(right=(True, True))}
    >>> {words: mask.tolist() for words, mask in mask_answers(found, ["a", "b"]).items() if mask[1] and not mask[0]}
    {'a wrong': [False, True], 'fixed': [False, True]}
    """
    rights = {name: np.array(right, bool) for name in models if (right := found[name].right) is not None}
    masks: dict[str, Mask] = {}
    for name, mask in rights.items():
        masks |= {f"{name} right": mask, f"{name} wrong": ~mask}
    if len(rights) == 2:
        a, b = rights.values()
        masks |= {FIXED: ~a & b, BROKEN: a & ~b}
    return masks


def mask_margins(margin: NDArray[np.floating]) -> dict[str, Mask]:
    """Return the choices of `LOWEST`, with masks of the samples with so low margins."""
    return {words: margin <= np.quantile(margin, share) for words, share in LOWEST.items()}


def mask_classes(answers: Sequence[str]) -> dict[str, Mask]:
    """Return the right answers that several samples share, with masks of these samples; empty if all differ."""
    known, counts = np.unique(answers, return_counts=True)
    if counts.max(initial=1) == 1:
        return {}
    return {str(one): np.array(answers) == one for one in known}
