"""Define the result of a merge: a model that can be saved, measured and returned as a library's object."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from featcal.export.merge import recipe_for, write_merge
from featcal.export.to_model import to_library_model
from featcal.family.opening import Family, ensure_family
from featcal.formats.weights import Weights
from featcal.suite.objects import SuiteObjects
from featcal.suite.recipe import MergeRecipe
from featcal.suite.schema import Suite
from featcal.system.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class MergeResult:
    """The experts of a suite merged by a recipe; computed when its tensors are read.

    >>> import featcal
    >>> merged = featcal.merge(featcal.load_suite("lm-mini"), "ties")
    >>> merged.recipe
    MergeRecipe(method='ties')
    >>> type(merged.to_model()).__name__
    'Qwen3ForCausalLM'
    """

    family: Family
    recipe: MergeRecipe
    weights: Weights
    """The merged weights; every function that takes a model accepts them."""

    def save(self, out: str | Path) -> dict[str, Any]:
        """Write a folder that `from_pretrained` loads, with card and `featcal.json`; returns the record with `out`.

        Raises:
            InputError: `out` exists or cannot be written, or an expert does not descend from the base.
            NumericalError: the folder does not load back to the same model.
        """
        return write_merge(self.family, self.recipe, out)

    def to_model(self) -> PreTrainedModel:
        """Return the merged model as the library's own class, in eval mode: bit for bit what `from_pretrained` loads
        from the folder that `save` writes.

        Raises:
            InputError: a model of another library than transformers.
        """
        return to_library_model(self.family, self.family.origin, self.weights)


def merge(
    suite: Suite | Family | None = None, method: str | None = None, **objects: Unpack[SuiteObjects]
) -> MergeResult:
    """Merge the experts of a suite, or given experts.

    Args:
        suite: a suite; without one, `objects` are the arguments of `Suite.of`: base, experts, and samples to measure
            on.
        method: with its options, such as "task-arithmetic:scale=0.3"; by default the recipe of the suite.

    Raises:
        InputError: unknown method or option, no method for a suite whose merged model is a checkpoint, or the errors of
            `Suite.of` and `open_family`.

    >>> import featcal
    >>> suite = featcal.load_suite("lm-mini")
    >>> merged = featcal.merge(suite, "ties:scale=0.5,density=0.3")
    >>> round(featcal.measure_drift(suite, merged.weights, samples=8).macro_cosine, 2)
    0.83
    """
    if suite is not None and objects:
        raise InputError(f"merge: give a suite, or {', '.join(objects)}, not both")
    if suite is None:
        if not {"base", "experts"} <= objects.keys():
            raise InputError("merge: nothing to merge; give a suite, or base= and experts=")
        if method is not None and "merged" in objects:
            raise InputError("merge: both merged and method say how the experts are merged; leave one out")
        suite = Suite.of(**(objects if method is None else {**objects, "merged": method}))
        method = None
    if not isinstance(suite, Suite | Family):
        raise InputError(f"merge: a {type(suite).__name__} is not a suite; give one, or base= and experts=")
    family = ensure_family(suite, "cpu")
    recipe = recipe_for(family.suite, method)
    return MergeResult(family, recipe, family.merge(recipe))
