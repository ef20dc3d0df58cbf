"""Bundle the objects that every walk over the blocks of a model needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from featcal.formats.weights import Weights
from featcal.models.activations import ActivationStore
from featcal.models.adapter import Adapter
from featcal.models.compute import Compute
from featcal.system.distributed import ALONE, Ranks
from featcal.system.progress import Progress, Seconds, silent


@dataclass(frozen=True)
class Run:
    """The models of one suite, with device, storage and timers, for one measurement or calibration."""

    adapter: Adapter
    base: Weights
    merged: Weights
    head: Mapping[str, Tensor]
    """Tensors outside the tower that all models share, on the compute device; empty if the base has none."""
    compute: Compute
    progress: Progress = silent
    store: ActivationStore = field(default_factory=ActivationStore)
    """Stores token states between two blocks, within its memory budget."""
    seconds: Seconds = field(default_factory=Seconds)
    """Timer that sums the seconds of every stage."""
    ranks: Ranks = ALONE
    """The processes that share the tasks."""
