"""Make the anchor that the ridge pulls to: W_anc = rho W_mer + (1 - rho) W_base (Eq. 11), likewise of biases and
norms."""

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
    """Return the tensors of a block of the merged model and of the base, which its anchors are made of, by name inside
    it, on the compute device.

    Args:
        rho: of the anchors; with 1 they are the merged model wherever they start from, and of a base that is not known
            its tensors are given.
        merged: by canonical name.
        modules: those inside the block whose tensors are needed; None for all.

    Raises:
        InputError: another rho, and the base is not known.
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
    """The anchor as a model of its own: base + rho (merged - base) in every tensor.

    It is computed in float64 and given in the merged model's dtype. A calibration comes to it as lam goes to infinity.
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
        # With rho above 1 the difference is extrapolated: half precision would lose its digits.
        found = {n: anchor(widen(merged[n]), widen(base[n]), self.rho).to(merged[n]) for n in wanted}
        for name, tensor in found.items():
            check_finite(tensor, f"{self.label}: tensor '{name}'", "choose a rho nearer to 1")
        return found
