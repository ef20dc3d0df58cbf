"""Fit ProbSurgery: modules of Representation Surgery, trained with noise of a learned size; see `surgery`."""

from __future__ import annotations

from dataclasses import dataclass

from featcal.baselines.surgery import Surgery
from featcal.suite.methods import MODULES, PROPOSED, SAMPLES, TASK, TRAINING, register_method
from featcal.suite.options import option


@register_method(
    "probsurgery",
    "ProbSurgery: Representation Surgery with modules that are trained with noise of a learned size",
    needs=(SAMPLES, TRAINING, MODULES, TASK),
    compared=tuple(f"probsurgery@{one}" for one in ("merged", *PROPOSED)),
)
@dataclass(frozen=True)
class ProbSurgery(Surgery):
    rank: int = option(128, "rank of every module", least=1)
    kl: float = option(1e-4, "weight of the KL divergence to N(0, I) in the loss", least=0)

    @property
    def noise(self) -> float:
        return self.kl
