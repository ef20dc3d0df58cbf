"""Merge by DARE and TIES: drop entries of task vectors at random and rescale the rest, then trim whole task vectors
and elect signs (Yu, Yu, Yu, Huang, Li, Language Models are Super Mario, arXiv 2311.03099).

`dare` with the same seed drops the same entries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from featcal.mergers.common.merger import Tensors, Whole
from featcal.mergers.dare import thin, thin_vectors
from featcal.mergers.ties import Ties, elect
from featcal.suite.methods import register_method
from featcal.suite.options import option


@register_method("dare-ties", "DARE, then TIES instead of Task Arithmetic", paper="2311.03099")
@dataclass(frozen=True)
class DareTies(Ties):
    drop: float = option(0.5, "probability p that an entry of a task vector is dropped", least=0, below=1)
    seed: int = option(42, "seed of the random choice of entries", least=0)

    def _parts(self, whole: Whole, task: str) -> Iterator[Tensor]:
        return (thin(vector, parts, self.drop, f"{self.seed}:{task}") for vector, parts in whole.vector(task))

    def merge(self, given: Tensors) -> Tensor:
        vectors = thin_vectors(given, self.drop, self.seed)
        return given.base + self.scale * elect(given.base, vectors, given.prepared)
