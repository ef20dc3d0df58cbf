"""Solve for the minimiser of WUDI's loss in closed form (see `wudi`): RegMean of the task matrices with their own Gram
matrices.

The flow of `swudi` ends here. Along directions that no task matrix reads, the loss does not depend on t, and the result
is the sum of the task matrices. Other tensors are averaged. The method has no scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from featcal.mergers.common.merger import merger
from featcal.mergers.swudi import swudi


@merger(
    "wudi-optimum",
    "the minimiser of WUDI's loss in closed form: the limit of `swudi` for infinite time, which differs from `wudi`",
    matrices=True,
)
def wudi_optimum(changes: Sequence[Tensor]) -> Tensor:
    """Return the minimiser of WUDI's loss that is nearest to the sum of the task matrices, `[m, d]`."""
    return swudi(changes, time=math.inf, share=1.0)
