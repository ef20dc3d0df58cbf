"""Mergers against their formulas, and recipes: what is read, how often, and in which dtype the result comes."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from featcal.errors import InputError
from featcal.family import Family
from featcal.mergers import linear, recipe, simple_averaging, task_arithmetic, ties
from featcal.mergers.recipe import RecipeWeights
from featcal.mergers.schema import MergeRecipe
from featcal.models.weights import InMemory, TensorInfo

NAMES = ("a", "b", "c")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def models(count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[InMemory]:
    """Models with three tensors of different shapes."""
    shapes = {"a": (3, 4), "b": (7,), "c": (2, 3, 2)}
    return [
        InMemory(f"model {i}", {name: random(*shape, seed=seed + 10 * i + j).to(dtype)})
        if False
        else InMemory(
            f"model {i}",
            {name: random(*shape, seed=seed + 10 * i + j).to(dtype) for j, (name, shape) in enumerate(shapes.items())},
        )
        for i in range(count)
    ]
