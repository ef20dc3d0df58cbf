"""Locate a model in parameter space by the cosine of its task vector to each expert's (Fig. 2d of the paper)."""

from __future__ import annotations

import torch

from featcal.family.opening import Family
from featcal.formats.weights import Weights


def task_vector_cosines(family: Family, model: Weights) -> dict[str, float]:
    """Return for each task the cosine between theta_model - theta_base and theta_expert - theta_base over all tensors
    of the tower; 0 if a task vector vanishes.

    >>> import featcal
    >>> family = featcal.open_family(featcal.load_suite("lm-mini"))
    >>> cosines = featcal.task_vector_cosines(family, family.merged)
    >>> {task: round(one, 2) for task, one in cosines.items()}
    {'sentiment': 0.41, 'entailment': 0.44, 'correct': 0.68, 'rewrite': 0.52}
    """
    dots = dict.fromkeys(family.experts, 0.0)
    squares = dict.fromkeys(family.experts, 0.0)
    own_square = 0.0
    # One tensor at a time: memory does not grow with the size of the models.
    for name in family.adapter.tower:
        base = family.base.read([name])[name].double()
        moved = model.read([name])[name].double() - base
        own_square += float(moved.square().sum())
        for task, expert in family.experts.items():
            vector = expert.read([name])[name].double() - base
            dots[task] += float(torch.sum(vector * moved))
            squares[task] += float(vector.square().sum())
    norms = {task: (squares[task] * own_square) ** 0.5 for task in dots}
    return {task: dots[task] / norms[task] if norms[task] > 0 else 0.0 for task in dots}
