"""An opened suite: its adapter and its models as sources of tensors. Headers are read, weights are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from featcal.errors import InputError
from featcal.mergers.recipe import RecipeWeights
from featcal.models.adapter import Adapter, adapter_for
from featcal.models.checkpoint import Checkpoint, read_config, resolve
from featcal.models.expert_pass import Batch, ExpertPass
from featcal.models.weights import Compute, InMemory, Weights, compute_for
from featcal.suite import MergeRecipe, Suite
from featcal.tasks.sources import Samples, draw

MODEL_ROLES = ("base", "merged", "expert")


@dataclass(frozen=True)
class Family:
    """Base, merged model and experts of a suite, ready to be read."""

    suite: Suite
    adapter: Adapter
    compute: Compute
    base: Weights
    merged: Weights
    experts: Mapping[str, Weights]
    container: Path
    """Folder whose layout and non-weight files an exported model takes over: the merged model's, else the base's."""

    @property
    def base_folder(self) -> Path:
        return resolve(self.suite.base, self.suite.root, "base")

    def model(self, name: str) -> Weights:
        """The model called "base" or "merged", or the checkpoint in a folder or on the Hub.

        Raises:
            InputError: no such model, or one that does not fit the suite; the message lists every difference.
        """
        if name in ("base", "merged"):
            return self.base if name == "base" else self.merged
        folder = resolve(name, Path.cwd(), f"model '{name}'")
        weights = Checkpoint(folder, f"model '{name}'", self.adapter.canonical)
        report_all(differences(self.adapter, weights))
        return weights

    def samples(self, task: str, split: str, count: int | None, seed: int) -> Samples:
        """`count` samples of a task's split (all with None), drawn by (seed, task name)."""
        return draw(self.suite, task, split, count, seed, self.base_folder)

    def expert_pass(self, samples: Samples, batch_size: int, keep: bool = False) -> ExpertPass:
        """The expert of the samples' task, about to walk over them in batches of `batch_size`."""
        batches = batches_of(samples, batch_size, self.compute.device)
        return ExpertPass(self.adapter, self.experts[samples.task], batches, samples.indices, self.compute, keep)

    def head(self) -> dict[str, Tensor]:
        """Head tensors of the base, on the compute device; empty where the base has none."""
        return self.compute.place(self.base.read(name for name in self.adapter.head if name in self.base.info))

    def resident(self) -> Family:
        """The same family with every tensor in memory, in the compute dtype of the storage device.

        For models that fit: interactive work reads them many times.
        """
        names = self.adapter.tower

        def load(weights: Weights, extra: Sequence[str] = ()) -> InMemory:
            return InMemory(weights.label, weights.read([*names, *extra]))

        head = [name for name in self.adapter.head if name in self.base.info]
        return replace(
            self,
            base=load(self.base, head),
            merged=load(self.merged),
            experts={task: load(expert) for task, expert in self.experts.items()},
        )


def open_family(suite: Suite, device: str = "auto", precision: str = "exact") -> Family:
    """Open every model of a suite and check from their headers that they belong together.

    Raises:
        InputError: listing *all* that is wrong: missing folders, other architectures, missing, extra or
            misshapen tensors.
    """
    compute = compute_for(device, precision)
    base_folder = resolve(suite.base, suite.root, "base")
    adapter = adapter_for(read_config(base_folder, "base"), compute.device, "base")
    problems: list[str] = []

    def checked(ref: str, label: str) -> Checkpoint | None:
        try:
            weights = Checkpoint(resolve(ref, suite.root, label), label, adapter.canonical)
            found = differences(adapter, weights)
        except InputError as error:
            found = [str(error)]
        problems.extend(found)
        return None if found else weights

    base = checked(suite.base, "base")
    experts = {task: checked(spec.expert, f"expert '{task}'") for task, spec in suite.tasks.items()}
    merged = None if isinstance(suite.merged, MergeRecipe) else checked(suite.merged, "merged")
    report_all(problems)
    present = {task: expert for task, expert in experts.items() if expert is not None}
    assert base is not None
    if isinstance(suite.merged, MergeRecipe):
        recipe = RecipeWeights(suite.merged, base, list(present.values()))
        return Family(suite, adapter, compute, base, recipe, present, base.folder)
    assert merged is not None
    return Family(suite, adapter, compute, base, merged, present, merged.folder)


def as_family(suite: Suite | Family, device: str = "auto", precision: str = "exact") -> Family:
    """`suite` itself if it is open already, else opened with the given options."""
    return suite if isinstance(suite, Family) else open_family(suite, device, precision)


def differences(adapter: Adapter, weights: Weights) -> list[str]:
    """Everything that keeps `weights` from being a model of the adapter's architecture; empty if nothing."""
    expected = {name: shape for name, shape in adapter.shapes().items() if name in adapter.tower}
    found = weights.info
    problems = []
    missing = [name for name in expected if name not in found]
    if len(missing) == len(expected):
        return [f"{weights.label}: none of the {len(expected)} tensors of a {adapter.family} tower is there"]
    if missing:
        problems.append(f"{weights.label}: missing tensors: {_some(missing)}")
    extra = [name for name in found if name not in expected and not adapter.carried(name)]
    if extra:
        problems.append(f"{weights.label}: tensors that the base's architecture does not have: {_some(extra)}")
    problems += [
        f"{weights.label}: tensor '{name}' has shape {list(found[name].shape)}, expected {list(shape)} as in the base"
        for name, shape in expected.items()
        if name in found and found[name].shape != shape
    ]
    return problems


def report_all(problems: Sequence[str]) -> None:
    """Raise one InputError that lists every problem; nothing if there is none."""
    if len(problems) == 1:
        raise InputError(problems[0])
    if problems:
        raise InputError("\n".join([f"{len(problems)} problems:", *(f"  {problem}" for problem in problems)]))


def batches_of(samples: Samples, size: int, device: torch.device) -> list[Batch]:
    """The samples' model inputs in batches of `size`, on the device."""
    return [
        {name: tensor[start : start + size].to(device) for name, tensor in samples.inputs.items()}
        for start in range(0, len(samples), size)
    ]


def _some(names: Sequence[str], most: int = 4) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
