"""Sum symmetric products; only the lower triangle is computed and stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from featcal.models.compute import widen
from featcal.system.errors import InputError

STRIP = 256
"""Number of columns of a Gram matrix that are computed together."""


def add_gram_product(total: Float[Tensor, "r d"], left: Float[Tensor, "n r"], right: Float[Tensor, "n d"]) -> None:
    """Add left^T right in place; a product of factors of another dtype has that dtype and is rounded once."""
    if left.dtype == total.dtype:
        # Accumulated inside the product: no second matrix of this size is needed.
        total.addmm_(left.mT, right)
    else:
        total.add_(left.mT @ right)


def add_alike(total: Tensor, part: Tensor) -> None:
    """Add in place what another process counted, from any device.

    Raises:
        InputError: another shape or dtype, which `add_` would broadcast or round without a word.
    """
    if (total.shape, total.dtype) != (part.shape, part.dtype):
        raise InputError(
            f"statistics {list(part.shape)} of {part.dtype} cannot be added to {list(total.shape)} of {total.dtype}"
        )
    total.add_(part.to(total.device))


@dataclass(frozen=True)
class Gram:
    """A symmetric matrix `[d, d]` as strips of columns, each from the diagonal down."""

    strips: Sequence[Tensor]

    @classmethod
    def zeros(cls, side: int, device: torch.device, dtype: torch.dtype) -> Gram:
        shapes = ((side - start, min(STRIP, side - start)) for start in range(0, side, STRIP))
        return cls([torch.zeros(shape, device=device, dtype=dtype) for shape in shapes])

    @classmethod
    def from_rows(cls, x: Float[Tensor, "n d"]) -> Gram:
        """Return the Gram matrix x^T x of rows x."""
        return cls([x[:, start:].mT @ x[:, start : start + STRIP] for start in range(0, x.shape[1], STRIP)])

    def add_rows(self, x: Float[Tensor, "n d"]) -> None:
        """Add the Gram matrix x^T x of further rows x."""
        for start, strip in self._places():
            add_gram_product(strip, x[:, start:], x[:, start : start + STRIP])

    def add(self, other: Gram, factor: Float[Tensor, ""]) -> None:
        """Add `factor` times another matrix of this size, in the dtype of this one."""
        for mine, theirs in zip(self.strips, other.strips, strict=True):
            # Not `add_` with alpha: the factor is a tensor on the device, which need not be waited for.
            mine.addcmul_(theirs.to(mine), factor.to(mine))

    def merge(self, other: Gram) -> None:
        """Add the sums of another part; raise InputError if it has another size or dtype."""
        for mine, theirs in zip(self.strips, other.strips, strict=True):
            add_alike(mine, theirs)

    def norm(self) -> Float[Tensor, ""]:
        """Return the Frobenius norm."""
        whole, diagonal = (
            widen(torch.stack([torch.linalg.matrix_norm(part) for part in parts])).square().sum()
            for parts in (self.strips, [strip[:STRIP] for strip in self.strips])
        )
        # What is below the diagonal blocks stands for both triangles, the blocks themselves for one.
        return (2 * whole - diagonal).sqrt()

    def lower(self, dtype: torch.dtype) -> Float[Tensor, "d d"]:
        """Return the matrix with zeros above the blocks on its diagonal."""
        side = len(self.strips[0])
        matrix = torch.zeros(side, side, dtype=dtype, device=self.strips[0].device)
        for start, strip in self._places():
            matrix[start:, start : start + STRIP] = strip
        return matrix

    def add_to(self, matrix: Float[Tensor, "d d"], factor: float) -> None:
        """Add `factor` times this matrix to one that has zeros above the blocks on its diagonal, in place."""
        for start, strip in self._places():
            matrix[start:, start : start + STRIP].add_(strip.to(matrix), alpha=factor)

    def full(self, dtype: torch.dtype) -> Float[Tensor, "d d"]:
        """Return the whole matrix."""
        matrix = self.lower(dtype)
        for start, strip in self._places():
            end = start + STRIP
            matrix[start:end, end:] = strip[STRIP:].mT
        return matrix

    def multiply(self, rows: Float[Tensor, "k d"]) -> Float[Tensor, "k d"]:
        """Multiply rows by the matrix without building the whole matrix."""
        parts = [rows[:, start:] @ strip for start, strip in self._places()]
        product = torch.cat(parts, dim=1)
        for start, strip in self._places():
            end = start + STRIP
            product[:, end:].addmm_(rows[:, start:end], strip[STRIP:].mT)
        return product

    def _places(self) -> list[tuple[int, Tensor]]:
        return [(i * STRIP, strip) for i, strip in enumerate(self.strips)]
