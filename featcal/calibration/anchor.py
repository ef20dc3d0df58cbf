"""Compute the anchor of the ridge: W_anc = rho W_mer + (1 - rho) W_base (Eq. 11), also for biases and norms."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from featcal.calibration.closed_form import anchor
from featcal.formats.weights import TensorInfo, UnknownBase, Weights, check_finite
from featcal.models.adapter import Block
from featcal.models.compute import widen
from featcal.models.context import Run


def read_merged_and_base(
    run: Run, block: Block, merged: Mapping[str, Tensor], rho: float, modules: Collection[str] | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Read the tensors of a block of the merged model and of the base, for its anchors, by name inside the block, on
    the compute device.

    Args:
        rho: of the anchors. With 1 they equal the merged model, whose tensors then replace those of an unknown base.
        merged: by canonical name.
        modules: those inside the block whose tensors are needed; None for all.

    Raises:
        InputError: rho is not 1 and the base is unknown.
    """
    is_idle = rho == 1 and isinstance(run.base, UnknownBase)
    start = merged if is_idle else run.base.read(block.names)
    inside = (block.local(tensors) for tensors in (merged, start))
    own, base = (
        run.compute.move({n: t for n, t in one.items() if modules is None or n.rpartition(".")[0] in modules})
        for one in inside
    )
    return own, base


@dataclass(frozen=True)
class AnchorWeights:
    """The anchor as a model: base + rho (merged - base) in every tensor.

    It is computed in float64 and returned in the merged model's dtype. A calibration converges to it as lam goes to
    infinity. For a merge by Task Arithmetic with scale s it is Task Arithmetic with scale rho * s, up to one rounding.
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
        # With rho above 1 the difference is extrapolated: half precision would lose its digits.
        found = {n: anchor(widen(merged[n]), widen(base[n]), self.rho).to(merged[n]) for n in wanted}
        for name, tensor in found.items():
            check_finite(tensor, f"{self.label}: tensor '{name}'", "choose a rho nearer to 1")
        return found
