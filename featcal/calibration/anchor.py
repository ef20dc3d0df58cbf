"""The model that the ridge pulls to, as a model of its own: what calibration is worth is what it adds to this."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from featcal.calibration.closed_form import anchor
from featcal.formats.weights import TensorInfo, Weights, check_finite


@dataclass(frozen=True)
class AnchorWeights:
    """base + rho (merged - base) in every tensor, Eq. (11), computed in float64 and given in the merged model's dtype.

    Of a merge by Task Arithmetic with scale s it is Task Arithmetic with scale rho * s, but for one rounding.
    """

    rho: float
    base: Weights
    merged: Weights

    @property
    def label(self) -> str:
        return f"anchor (rho {self.rho:g})"

    @property
    def info(self) -> Mapping[str, TensorInfo]:
        return self.merged.info

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        wanted = list(names)
        merged, base = self.merged.read(wanted), self.base.read(wanted)
        found = {n: anchor(merged[n].double(), base[n].double(), self.rho).to(merged[n].dtype) for n in wanted}
        for name, tensor in found.items():
            check_finite(tensor, f"{self.label}: tensor '{name}'", "choose a rho nearer to 1")
        return found
