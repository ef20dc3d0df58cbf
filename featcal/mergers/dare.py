"""DARE: entries of task vectors are dropped at random and the rest is rescaled, before the task vectors are merged by
Task Arithmetic or TIES (Yu, Yu, Yu, Huang, Li, Language Models are Super Mario, arXiv 2311.03099, Sec. 3).

Every entry is dropped with probability p on its own (Bernoulli), and what stays is divided by 1 - p, so that the
expectation is the task vector. What is dropped depends on seed, task and tensor name alone: not on which tensors are
read together or in which order, and other experts change nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

DEFAULT_DROP = 0.5
DEFAULT_SCALE = 0.3
DEFAULT_SEED = 42


def merge(base: Tensor, vectors: Iterable[Tensor], scale: float | None = None) -> Tensor:
    """Base plus `scale` (0.3 when None) times the sum of task vectors that were thinned, taken one at a time."""
    total = torch.zeros_like(base)
    for vector in vectors:
        total += vector
    return base + (DEFAULT_SCALE if scale is None else scale) * total


def thin(vector: Tensor, drop: float | None, streams: Sequence[str], sizes: Sequence[int]) -> Tensor:
    """The task vector with entries dropped at random and the others divided by 1 - p.

    Args:
        vector: `[entries]`, consecutive parts of `sizes` entries.
        drop: p in [0, 1), 0.5 when None.
        streams: what the draw of every part depends on; see `stream`.
    """
    p = DEFAULT_DROP if drop is None else drop
    drawn = [torch.rand(size, generator=_generator(one)) for one, size in zip(streams, sizes, strict=True)]
    return vector * (torch.cat(drawn) >= p) / (1 - p)


def stream(seed: int | None, task: str, name: str) -> str:
    """What tells the draw for one tensor of one expert from all others; the seed is 42 when None."""
    return f"{DEFAULT_SEED if seed is None else seed}:{task}:{name}"


def _generator(stream: str) -> torch.Generator:
    digest = hashlib.sha256(stream.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
