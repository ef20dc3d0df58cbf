"""Follow WUDI's loss (see `wudi`) downhill from the sum of the task matrices for a given time, in closed form, instead
of to its minimum: our reconstruction of SWUDI (arXiv 2606.07289) from its abstract.

WUDI's loss has the gradient 2 (t A - B), so the flow dt/ds = B - t A from t_0, the sum of the task matrices, is
t(s) = t_0 + (B A^+ - t_0) V (1 - e^(-s L)) V^T with A = V L V^T: strong directions of A arrive at once, weak ones
hardly leave t_0. Other tensors are averaged. There is no scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from featcal.mergers.common.merger import merger
from featcal.mergers.wudi import normal_equations
from featcal.suite.options import option


@merger(
    "swudi",
    "WUDI's loss, followed downhill from the sum of the task matrices for a limited time, in closed form (after SWUDI)",
    paper="2606.07289",
    matrices=True,
)
def swudi(
    changes: Sequence[Tensor],
    *,
    time: float = option(256.0, "how long the gradient flow runs, in the unit of 1 / eigenvalues", least=0),
    share: float = option(
        1.0, "share of the eigenvectors along which the matrix changes, the strongest first", least=0, most=1
    ),
) -> Tensor:
    """Return the merged task matrix t `[m, d]` after some time of the gradient flow that starts at the sum of the task
    matrices, along the strongest directions.

    With A = Q diag(l) Q^T it is t_0 - (t_0 A - B) Q_K diag((1 - e^(-s l)) / l) Q_K^T. Eigenvalues up to d * eps of the
    largest count as 0: along these directions t does not change.

    Args:
        time: s, >= 0; 0 is the sum of the task matrices, infinity the minimiser.
        share: share of the d eigenvectors along which t changes, those with the largest eigenvalues first, in [0, 1].
    """
    a, b = normal_equations(changes)
    start = sum(changes[1:], changes[0])
    values, vectors = torch.linalg.eigh(a)
    kept = round(len(values) * share)
    seen = values > len(values) * torch.finfo(values.dtype).eps * values[-1]
    # `eigh` gives eigenvalues in ascending order.
    seen[: len(values) - kept] = False
    q, strength = vectors[:, seen], values[seen]
    # Of a weak direction 1 - e^(-s l) is tiny: `expm1` keeps its digits.
    moved = -torch.expm1(-strength * time) / strength
    step: Tensor = ((start @ a - b) @ q * moved) @ q.T
    return start - step
