"""What a suite file says about a merge: the method, and the options that the method has."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, FiniteFloat, SerializerFunctionWrapHandler, model_serializer, model_validator

from featcal.suite.strict import Strict

Method = Literal[
    "simple-averaging",
    "linear",
    "task-arithmetic",
    "ties",
    "ties-per-tensor",
    "dare",
    "dare-ties",
    "breadcrumbs",
    "model-stock",
    "tsv-m",
    "iso-c",
    "iso-cts",
    "ace",
    "swudi",
    "wudi",
    "wudi-optimum",
]
METHODS: tuple[str, ...] = get_args(Method)
Density = Annotated[float, Field(gt=0, le=1)]
Share = Annotated[float, Field(ge=0, le=1)]
DEFAULT_BETA = 0.9
DEFAULT_GAMMA = 0.99
"""Percentiles of Breadcrumbs."""

OPTIONS: dict[str, tuple[str, ...]] = {
    "simple-averaging": (),
    "linear": ("weights", "normalize"),
    "task-arithmetic": ("scale", "weights", "normalize"),
    "ties": ("scale", "density"),
    "ties-per-tensor": ("scale", "weights", "density", "normalize"),
    "dare": ("scale", "drop", "seed"),
    "dare-ties": ("scale", "density", "drop", "seed"),
    "breadcrumbs": ("scale", "beta", "gamma"),
    "model-stock": (),
    "tsv-m": ("scale",),
    "iso-c": ("scale",),
    "iso-cts": ("scale", "common"),
    "ace": ("scale", "eps"),
    "swudi": ("time", "share"),
    "wudi": ("steps",),
    "wudi-optimum": (),
}
"""Options of every method; all of them also take `dtype`. One that is left out has the merger's own default."""
_YOUNGER = ("eps", "time", "share")
"""Options that came later."""


class MergeRecipe(Strict):
    """Merge the experts on the fly instead of reading a merged checkpoint."""

    method: Method
    scale: FiniteFloat | None = None
    """Factor of the combined task vectors; the merger's own (0.3 for Task Arithmetic, 1 for TIES) when left out."""
    weights: dict[str, FiniteFloat] | None = None
    """Weight of every task's expert, by task name; all 1 when left out."""
    density: Density | dict[str, Density] | None = None
    """TIES: share of a task vector's entries that is kept, for all experts or by task name; 0.2 when left out."""
    drop: Annotated[float, Field(ge=0, lt=1)] | None = None
    """DARE: probability p that an entry of a task vector is dropped; 0.5 when left out."""
    seed: Annotated[int, Field(ge=0)] | None = None
    """DARE: of what is dropped; 42 when left out."""
    beta: Share | None = None
    """Breadcrumbs: share of a tensor's entries, the smallest, that is masked; 0.9 when left out."""
    gamma: Share | None = None
    """Breadcrumbs: share of a tensor's entries above which the largest are masked; 0.99 when left out."""
    common: Share | None = None
    """Iso-CTS: share of a matrix's directions that the common space has; 0.8 when left out."""
    eps: Annotated[FiniteFloat, Field(gt=0)] | None = None
    """ACE: ridge strength, in the unit of the weights squared; 1e-5 when left out."""
    steps: Annotated[int, Field(ge=0)] | None = None
    """WUDI: steps of Adam; 300 when left out."""
    time: Annotated[FiniteFloat, Field(ge=0)] | None = None
    """SWUDI: how long the gradient flow runs, in the unit of 1 / eigenvalues; 256 when left out."""
    share: Share | None = None
    """SWUDI: share of the eigenvectors, the strongest, that are followed; all when left out."""
    normalize: bool | None = None
    """Divide by the sum of the weights; left out, `linear` and `ties-per-tensor` do and Task Arithmetic does not."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Storage dtype of the merged model; the base's own when left out."""

    @model_serializer(mode="wrap")
    def _younger_options_where_given(self, dumped: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without those of `_YOUNGER` that are left out: the history and the measurements of a suite go by what it
        says, and those from before there was such an option are still of it."""
        return {name: value for name, value in dumped(self).items() if name not in _YOUNGER or value is not None}

    @model_validator(mode="after")
    def _options_belong_to_the_method(self) -> MergeRecipe:
        given = self.model_fields_set - {"method", "dtype"}
        misplaced = sorted(name for name in given - set(OPTIONS[self.method]) if getattr(self, name) is not None)
        if misplaced:
            takes = ", ".join([*OPTIONS[self.method], "dtype"])
            names = ", ".join(f"'{name}'" for name in misplaced)
            other = " or, where mergekit's method is meant, write ties-per-tensor" if self.method == "ties" else ""
            raise ValueError(f"{names} means nothing to {self.method}, which takes {takes}; remove it{other}")
        return self

    @model_validator(mode="after")
    def _weights_can_be_normalized(self) -> MergeRecipe:
        divides = self.method == "linear" if self.normalize is None else self.normalize
        weights = list((self.weights or {}).values())
        if (
            divides
            and self.method != "ties-per-tensor"
            and weights
            and abs(sum(weights)) <= 1e-9 * sum(map(abs, weights))
        ):
            raise ValueError("'weights' sum to 0, so they cannot be normalized; change them or set 'normalize: false'")
        return self

    @model_validator(mode="after")
    def _something_stays_between_percentiles(self) -> MergeRecipe:
        low = DEFAULT_BETA if self.beta is None else self.beta
        high = DEFAULT_GAMMA if self.gamma is None else self.gamma
        if low >= high:
            raise ValueError(f"nothing lies between 'beta' ({low:g}) and 'gamma' ({high:g}); beta must be the smaller")
        return self

    @property
    def notes(self) -> list[str]:
        """What should be known of the method: of a name that means something else elsewhere."""
        if self.method != "ties":
            return []
        return [
            "merged: ties trims whole task vectors, as published; trimmed tensor by tensor, as mergekit does it, it "
            "is ties-per-tensor"
        ]

    def misfits(self, tasks: Collection[str]) -> list[str]:
        """What keeps the recipe from being one for experts of these tasks; empty if nothing does."""
        problems = []
        for option in ("weights", "density"):
            given = getattr(self, option)
            if not isinstance(given, dict):
                continue
            missing = [f"'{task}'" for task in tasks if task not in given]
            foreign = [f"'{task}'" for task in given if task not in tasks]
            if missing:
                problems.append(f"merged.{option}: give one for every task; missing {', '.join(missing)}")
            if foreign:
                problems.append(f"merged.{option}: no task {', '.join(foreign)}; there are {', '.join(tasks)}")
        return problems
