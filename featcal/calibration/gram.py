"""Symmetric products: their lower triangle alone is formed, strip by strip."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

STRIP = 512
"""Columns of a Gram matrix that are formed together."""


def add_product(total: Float[Tensor, "r d"], left: Float[Tensor, "n r"], right: Float[Tensor, "n d"]) -> None:
    """Add left^T right in place.

    Factors in the dtype of `total` are accumulated inside the product; bfloat16 factors give a bfloat16 product of
    this batch, which is added in the dtype of `total`.
    """
    if left.dtype == total.dtype:
        total.addmm_(left.mT, right)
    else:
        total.add_(left.mT @ right)


def add_gram(gram: Float[Tensor, "d d"], x: Float[Tensor, "n d"]) -> None:
    """Add the lower triangle of x^T x in place; strip by strip, which leaves out most of the upper one."""
    for start in range(0, len(gram), STRIP):
        add_product(gram[start:, start : start + STRIP], x[:, start:], x[:, start : start + STRIP])


def mirror(gram: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
    """Fill the upper triangle that `add_gram` left out, in place."""
    for start in range(0, len(gram), STRIP):
        end = start + STRIP
        gram[start:end, end:] = gram[end:, start:end].mT
    return gram


def gram_norm(gram: Float[Tensor, "d d"]) -> Float[Tensor, ""]:
    """Frobenius norm of a symmetric matrix whose upper triangle `add_gram` left out."""
    square = torch.zeros((), dtype=torch.float64, device=gram.device)
    for start in range(0, len(gram), STRIP):
        end = start + STRIP
        square += torch.linalg.matrix_norm(gram[start:end, start:end]).double().square()
        square += 2 * torch.linalg.matrix_norm(gram[end:, start:end]).double().square()
    return square.sqrt()
