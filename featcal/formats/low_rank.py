"""Add products of low rank to tensors of a model, computed when they are read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from featcal.formats.weights import Weights, WrappedWeights, factors_of

Factors = tuple[Tensor, Tensor]
"""B `[m, r]` and A `[r, d]`, whose product B A is added to a linear map `[m, d]`."""


@dataclass(frozen=True)
class Adapted(WrappedWeights):
    """A model with products B A added to some of its linear maps, in the dtype of each."""

    label: str
    under: Weights
    products: Mapping[str, Factors]
    """Products B A by canonical name of the weight."""
    transposed: Collection[str] = ()
    """Names of the weights that are stored `[inputs, outputs]`."""

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        tensors = dict(self.under.read(names))
        for name in tensors.keys() & self.products.keys():
            tensors[name] = add_low_rank(tensors[name], self.products[name], name in self.transposed)
        return tensors

    def factors(self, names: Iterable[str]) -> dict[str, Factors]:
        """Return B and A of the model below, for maps to which nothing is added here."""
        return factors_of(self.under, [name for name in names if name not in self.products])


def add_low_rank(weight: Tensor, factors: Factors, transposed: bool = False) -> Tensor:
    """Return a stored weight with B A added, rounded once to its dtype."""
    # In half precision B A itself would be rounded, too.
    dtype = torch.promote_types(weight.dtype, torch.float32)
    up, down = (one.to(weight.device, dtype) for one in factors)
    product = up @ down
    return (weight.to(dtype) + (product.mT if transposed else product)).to(weight.dtype)
