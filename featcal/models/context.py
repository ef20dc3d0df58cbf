"""What travels through every walk over the blocks of a model."""

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
    """The models of one suite and the means of one measurement or calibration."""

    adapter: Adapter
    base: Weights
    merged: Weights
    head: Mapping[str, Tensor]
    """Tensors outside the tower that all models share, on the compute device; empty where the base has none."""
    compute: Compute
    progress: Progress = silent
    store: ActivationStore = field(default_factory=ActivationStore)
    """Holds token states between two blocks; its budget is what they may take in memory."""
    seconds: Seconds = field(default_factory=Seconds)
    """Adds up where the time goes."""
    ranks: Ranks = ALONE
    """The processes that share the tasks."""
