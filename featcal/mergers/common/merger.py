"""Describe a merger: options, and a function from the base's tensors and the experts' to merged ones, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, make_dataclass
from inspect import signature
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from featcal.suite.methods import MERGER, Method, register_method
from featcal.system.errors import InputError

Option = float | Mapping[str, float]
"""A value for all tasks, or one per task."""


@dataclass(frozen=True)
class Tensors:
    """Tensors that are merged together: flattened and concatenated, `[entries]` per model."""

    base: Tensor
    experts: Iterable[Tensor]
    """Experts' vectors in the order of `tasks`, one at a time; an iterator to consume once."""
    tasks: Sequence[str]
    parts: Mapping[str, int]
    """Name and number of entries of every tensor, in the order of concatenation."""
    prepared: Any = None
    """Result of the merger's `prepare`."""

    def vectors(self) -> Iterator[Tensor]:
        """Yield the task vectors theta_i - theta_0, one at a time."""
        return (expert - self.base for expert in self.experts)

    def split(self, vector: Tensor) -> Sequence[Tensor]:
        """Return the part of a concatenated vector that belongs to each tensor."""
        return torch.split(vector, list(self.parts.values()))

    def values_per_expert(self, option: Option | None) -> list[float]:
        """Return the value of an option for every expert; 1 where it is None."""
        return [
            option[task] if isinstance(option, Mapping) else 1.0 if option is None else option for task in self.tasks
        ]


@dataclass(frozen=True)
class Whole:
    """All tensors that are merged, for mergers that examine whole task vectors before they merge."""

    tasks: Sequence[str]
    entries: int
    """Number of entries of a task vector."""
    vector: Callable[[str], Iterator[tuple[Tensor, Mapping[str, int]]]]
    """Reads the task vector of a task from the start: some tensors at a time, with their names and sizes."""


@dataclass(frozen=True)
class Merger(Method):
    """A merger that works entry by entry: it takes the experts one at a time, whichever tensors are read together.

    >>> import featcal
    >>> from dataclasses import dataclass
    >>> @featcal.register_method("mean-plus", "the mean of the experts, taken further")
    ... @dataclass(frozen=True)
    ... class MeanPlus(featcal.Merger):
    ...     scale: float = featcal.option(1.5, "factor of the mean task vector", above=0)
    ...     def merge(self, given):
    ...         return given.base + self.scale / len(given.tasks) * sum(given.vectors())
    >>> ledger = featcal.measure_drift(featcal.load_suite("lm-mini"), "mean-plus:scale=2", samples=8)
    >>> round(ledger.macro_cosine, 2)
    0.87
    """

    role: ClassVar[str] = MERGER
    symmetric: ClassVar[bool] = True
    """True if the order of the experts makes no difference, rounding aside."""
    entrywise: ClassVar[bool] = False
    """True if `merge` takes every entry by itself, except for what was prepared: large tensors are then merged in
    pieces. A class with a `merge` of its own has to say so anew."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "merge" in vars(cls) and "entrywise" not in vars(cls):
            cls.entrywise = False

    def prepare(self, whole: Whole) -> Any:
        """Return what `merge` needs to know of all tensors together; called once, before the first tensor is merged."""
        return None

    def merge(self, given: Tensors) -> Tensor:
        """Return the merged tensors, concatenated: `[entries]`."""
        raise NotImplementedError


@dataclass(frozen=True)
class MatrixMerger(Merger):
    """A merger that works on whole task matrices of all experts at once, and averages all other tensors.

    It needs memory for one matrix of every expert in float64, and for its decomposition: more than for one block of
    each model, if a matrix is a third of a block. For eight B/32 experts Iso-C takes 0.24 GB, TSV-M 0.5, Iso-CTS 0.6,
    ACE and WUDI's optimum 0.7; a block of each model and the base is 0.25 GB in float32. The need does not grow with
    the number of blocks.

    >>> import featcal, torch
    >>> from dataclasses import dataclass
    >>> @featcal.register_method("rank-one", "the strongest singular component of the mean task matrix")
    ... @dataclass(frozen=True)
    ... class RankOne(featcal.MatrixMerger):
    ...     def merge_matrix(self, changes):
    ...         u, s, v = torch.linalg.svd(sum(changes) / len(changes), full_matrices=False)
    ...         return s[0] * torch.outer(u[:, 0], v[0])
    >>> family = featcal.open_family(featcal.load_suite("lm-mini"))
    >>> merged, name = featcal.merge(family.suite, "rank-one").weights, "model.layers.0.mlp.down_proj.weight"
    >>> change = merged.read([name])[name].float() - family.base.read([name])[name].float()
    >>> int(torch.linalg.matrix_rank(change, rtol=0.01))
    1
    """

    entrywise: ClassVar[bool] = True

    def merge_matrix(self, changes: Sequence[Tensor]) -> Tensor:
        """Return the merged task matrix `[m, d]` of the experts' task matrices theta_i -
        theta_0, times `scale` if the merger has that option.
        """
        raise NotImplementedError

    def merge(self, given: Tensors) -> Tensor:
        return given.base + getattr(self, "scale", 1.0) / len(given.tasks) * add_up(given.base, given.vectors())


Made = TypeVar("Made", bound=Callable[..., Tensor])


def merger(
    name: str,
    summary: str,
    *,
    matrices: bool = False,
    entrywise: bool = False,
    check: Callable[..., None] | None = None,
    **about: Any,
) -> Callable[[Made], Made]:
    """Return the decorator that makes a merger of one function, whose keyword parameters are its options.

    The function takes `Tensors`, like `Merger.merge`; or, with `matrices`, the arguments of
    `MatrixMerger.merge_matrix`. It can still be called as a plain function, with the options' defaults.

    Args:
        name, summary, about: as for `register_method`.
        entrywise: whether the function takes every entry by itself (`Merger.entrywise`).
        check: a function of some of the options, which raises InputError if they contradict each other.

    Raises:
        InputError: the default of a keyword parameter is no `option`, or the name is not allowed.

    >>> import featcal
    >>> @featcal.merger("mean-vector", "the base plus the mean of the task vectors")
    ... def mean_vector(given, *, scale: float = featcal.option(1.0, "factor of the mean", above=0)):
    ...     return given.base + scale / len(given.tasks) * sum(given.vectors())
    >>> ledger = featcal.measure_drift(featcal.load_suite("lm-mini"), "mean-vector:scale=1.5", samples=8)
    >>> round(ledger.macro_cosine, 2)
    0.87
    """
    of, called = (MatrixMerger, "merge_matrix") if matrices else (Merger, "merge")

    def register(function: Any) -> Any:
        options: Mapping[str, Any] = function.__kwdefaults__ or {}
        for one, default in options.items():
            if not isinstance(default, Field):
                raise InputError(f"method '{name}': write {one}=option({default!r}, HELP), not {one}={default!r}")

        def require(self: Merger) -> None:
            of.__post_init__(self)
            if check is not None:
                check(**{one: getattr(self, one) for one in signature(check).parameters})

        fields = [(one, Any, default) for one, default in options.items()]
        body = {
            called: lambda self, given: function(given, **vars(self)),
            "__post_init__": require,
            "entrywise": entrywise or of.entrywise,
        }
        kind: Any = make_dataclass(function.__name__, fields, bases=(of,), namespace=body, frozen=True)
        kind.__module__ = function.__module__
        register_method(name, summary, **about)(kind)
        function.__kwdefaults__ = {one: default.default for one, default in options.items()}
        return function

    return register


def add_up(like: Tensor, vectors: Iterable[Tensor]) -> Tensor:
    """Return the sum of vectors, added one at a time and in order; only the shape and dtype of `like` are used."""
    total = torch.zeros_like(like)
    for vector in vectors:
        total += vector
    return total


def weighted_sum(like: Tensor, vectors: Iterable[Tensor], weights: Sequence[float], normalize: bool) -> Tensor:
    """Return the weighted sum of vectors, divided by the sum of the weights if `normalize`."""
    total, mass = torch.zeros_like(like), 0.0
    for vector, weight in zip(vectors, weights, strict=True):
        total.add_(vector, alpha=weight)
        mass += weight
    return total / mass if normalize else total


def require_divisor(weights: Mapping[str, float] | None, normalize: bool) -> None:
    """Raise InputError if weights that are to be normalized sum to 0."""
    values = list((weights or {}).values())
    # Relative to their size: weights that cancel rarely sum to exactly 0 in floating point.
    if normalize and values and abs(sum(values)) <= 1e-9 * sum(map(abs, values)):
        raise InputError("'weights' sum to 0, so they cannot be normalized; change them or set 'normalize: false'")
