"""Split the drift through one layer into local mismatch and propagation (Prop. 1)."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from featcal.models.compute import widen


@dataclass(frozen=True)
class Parts:
    """The parts e = m + p of one layer (Eqs. 2 and 3), one row of float64 per sample."""

    expert: Float[Tensor, "n d"]
    """The expert's feature."""
    e: Float[Tensor, "n d"]
    """Drift: the model's feature minus the expert's."""
    m: Float[Tensor, "n d"]
    """Local mismatch: the model's layer on the expert's state, minus the expert's feature."""
    p: Float[Tensor, "n d"]
    """Propagation: the model's feature, minus its layer on the expert's state."""
    incoming: Float[Tensor, "n d"] | None
    """e before the layer; None if the layer has no skip connection."""

    @property
    def r(self) -> Float[Tensor, "n d"] | None:
        """Return r = p - incoming, the residual branch's response to the incoming drift (Eq. 28)."""
        return None if self.incoming is None else self.p - self.incoming


def split_drift(after: tuple[Tensor, Tensor, Tensor], before: tuple[Tensor, Tensor] | None, class_token: bool) -> Parts:
    """Split one batch's drift through one layer.

    Args:
        after: `[batch, tokens, width]`, or `[batch, k]` after the last layer: the expert's state, the model's layer on
            it, and the model's own state.
        before: the expert's and the model's state before the layer; None if it has no skip connection.
        class_token: use only the first token.
    """
    expert, on_expert, model = (_rows(state, class_token) for state in after)
    incoming = None if before is None else _rows(before[1] - before[0], class_token)
    return Parts(expert, model - expert, on_expert - expert, model - on_expert, incoming)


def _rows(state: Tensor, class_token: bool) -> Tensor:
    chosen = state[:, :1] if class_token and state.ndim == 3 else state
    # Drift is a small difference of large states: norms of float32 differences would lose its digits.
    return widen(chosen.flatten(1))
