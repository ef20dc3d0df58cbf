"""Merge by Iso-C: set all singular values of the summed task matrices to their mean (Marczak, Magistri, Cygert,
Twardowski, Bagdanov, van de Weijer, No Task Left Behind, arXiv 2502.04959).

The sum is that of Task Arithmetic. Other tensors are averaged. The paper tunes the scale alpha; 1 where none is given,
as in FusionBench. Use it for experts that were fine-tuned in full: of low-rank updates it amplifies rounding noise to
the strength of the real directions.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from featcal.mergers.common.merger import merger
from featcal.mergers.common.singular import largest_singular
from featcal.suite.options import option


@merger(
    "iso-c",
    "Isotropic merging: all singular values of the summed task matrices equal",
    paper="2502.04959",
    matrices=True,
)
def iso_c(
    changes: Sequence[Tensor], *, scale: float = option(1.0, "factor (alpha) of the merged task matrix")
) -> Tensor:
    """Return mean(S) U V^T times the scale, where sum_i tau_i = U S V^T."""
    u, s, vh = largest_singular(sum(changes[1:], changes[0]))
    # The sum of nothing is 0: of matrices that no expert changed there is no direction.
    return scale * (s.sum() / max(1, len(s)) * (u @ vh))
