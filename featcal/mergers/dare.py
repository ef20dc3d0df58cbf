"""Merge by DARE: drop entries of task vectors at random and rescale the rest, then merge them by Task Arithmetic or
TIES (Yu, Yu, Yu, Huang, Li, Language Models are Super Mario, arXiv 2311.03099, Sec. 3).

Each entry is dropped independently with probability p, and the others are divided by 1 - p, so that the expectation is
the task vector. Only the seed, the task and the tensor's name decide which entries are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from featcal.mergers.common.merger import Tensors, add_up, merger
from featcal.suite.options import option
from featcal.system.fingerprints import seed_from_text


@merger(
    "dare",
    "DARE: a share of every task vector's entries dropped at random, the rest rescaled, then Task Arithmetic",
    paper="2311.03099",
)
def dare(
    given: Tensors,
    *,
    scale: float = option(0.3, "factor of the summed task vectors"),
    drop: float = option(0.5, "probability p that an entry of a task vector is dropped", least=0, below=1),
    seed: int = option(42, "seed of the random choice of entries", least=0),
) -> Tensor:
    return given.base + scale * add_up(given.base, thin_vectors(given, drop, seed))


def thin_vectors(given: Tensors, drop: float, seed: int) -> Iterator[Tensor]:
    """Yield task vectors with entries dropped and the others rescaled, one vector at a time."""
    for task, vector in zip(given.tasks, given.vectors(), strict=True):
        yield thin(vector, given.parts, drop, f"{seed}:{task}")


def thin(vector: Tensor, parts: Mapping[str, int], drop: float, stream: str) -> Tensor:
    """Return the task vector with entries dropped at random and the others divided by 1 - p.

    Args:
        vector: `[entries]`, consecutive tensors with the names and sizes of `parts`.
        drop: p in [0, 1).
        stream: name of the random stream; together with a tensor's name it decides which entries are dropped.
    """
    # A stream per tensor: which tensors are read together, and in which order, then changes nothing.
    seeds = {name: seed_from_text(f"{stream}:{name}") for name in parts}
    drawn = [torch.rand(size, generator=torch.Generator().manual_seed(seeds[name])) for name, size in parts.items()]
    return vector * (torch.cat(drawn).to(vector.device) >= drop) / (1 - drop)
