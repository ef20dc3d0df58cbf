"""Iso-C: the summed task matrices with all singular values equal to their mean (Marczak, Magistri, Cygert, Twardowski,
Bagdanov, van de Weijer, No Task Left Behind, arXiv 2502.04959).

The sum is that of Task Arithmetic. What is no matrix is averaged. The paper tunes the scale alpha; 1 where none is
given, as in FusionBench. The method is meant for experts that were fine-tuned in full: of low-rank updates it lifts
what rounding adds to the strength of the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from featcal.mergers.singular import top


def merge(changes: Sequence[Tensor]) -> Tensor:
    """mean(S) U V^T of sum_i tau_i = U S V^T, all `[m, d]`."""
    u, s, vh = top(sum(changes[1:], changes[0]))
    return s.sum() / max(1, len(s)) * (u @ vh)
