"""An opened suite: its adapter and its models as sources of tensors. Headers are read, weights are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from featcal.errors import InputError
from featcal.mergers.recipe import RecipeWeights
from featcal.models.adapter import Adapter, Batch, adapter_for
from featcal.models.checkpoint import Checkpoint, read_config, resolve, stored_names
from featcal.models.expert_pass import ExpertPass
from featcal.models.weights import PRECISIONS, Compute, InMemory, Weights, compute_for
from featcal.suite import MergeRecipe, Suite
from featcal.tasks.sources import Samples, draw


@dataclass(frozen=True)
class Family:
    """Base, merged model and experts of a suite, ready to be read."""

    suite: Suite
    adapter: Adapter
    compute: Compute
    base: Weights
    merged: Weights
    experts: Mapping[str, Weights]
    base_folder: Path
    """Where tokenizer, image processor and text tower come from."""
    container: Path
    """Folder whose layout and non-weight files an exported model takes over: the merged model's, else the base's."""

    def model(self, name: str) -> Weights:
        """The model called "base" or "merged", or the checkpoint in a folder or on the Hub.

        Raises:
            InputError: no such model, or one that does not fit the suite; the message lists every difference.
        """
        if name in ("base", "merged"):
            return self.base if name == "base" else self.merged
        folder = resolve(name, Path.cwd(), f"model '{name}'")
        return _open_checked(folder, f"model '{name}'", self.adapter, self.compute.device)

    def samples(self, task: str, split: str, count: int | None, seed: int) -> Samples:
        """`count` samples of a task's split (all with None), drawn by (seed, task name).

        Raises:
            InputError: as `draw`, and inputs that the model does not take.
        """
        drawn = draw(self.suite, task, split, count, seed, self.base_folder)
        problem = self.adapter.misfit(drawn.inputs)
        if problem is not None:
            raise InputError(f"task '{task}', {split} samples: {problem}")
        return drawn

    def expert_pass(self, samples: Samples, batch_size: int, keep: bool = False) -> ExpertPass:
        """The expert of the samples' task, about to walk over them in batches of `batch_size`."""
        batches = batches_of(samples, batch_size, self.compute.device)
        return ExpertPass(self.adapter, self.experts[samples.task], batches, samples.indices, self.compute, keep)

    def head(self) -> dict[str, Tensor]:
        """Head tensors of the base, on the compute device; empty where the base has none."""
        return self.compute.place(self.base.read(name for name in self.adapter.head if name in self.base.info))

    def resident(self) -> Family:
        """The same family with every tensor in memory as it is stored: interactive work reads them many times."""
        names = self.adapter.tower

        def load(weights: Weights, extra: Sequence[str] = ()) -> InMemory:
            files = weights.files if isinstance(weights, Checkpoint) else ()
            return InMemory(weights.label, weights.read([*names, *extra]), files)

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
    config = read_config(base_folder, "base")
    adapter = adapter_for(config, stored_names(base_folder, "base"), compute.device, "base")
    problems: list[str] = []

    def checked(ref: str, label: str) -> Checkpoint | None:
        try:
            return _open_checked(resolve(ref, suite.root, label), label, adapter, compute.device)
        except InputError as error:
            problems.extend(error.problems)
            return None

    base = checked(suite.base, "base")
    experts = {task: checked(spec.expert, f"expert '{task}'") for task, spec in suite.tasks.items()}
    merged = None if isinstance(suite.merged, MergeRecipe) else checked(suite.merged, "merged")
    report_all(problems)
    present = {task: expert for task, expert in experts.items() if expert is not None}
    assert base is not None
    if isinstance(suite.merged, MergeRecipe):
        recipe = RecipeWeights(suite.merged, base, list(present.values()))
        return Family(suite, adapter, compute, base, recipe, present, base_folder, base.folder)
    assert merged is not None
    return Family(suite, adapter, compute, base, merged, present, base_folder, merged.folder)


def as_family(suite: Suite | Family, device: str = "auto", precision: str | None = None) -> Family:
    """A suite opened with the given options; an open one on its own device, in the given precision if there is one.

    A family that computes in float64, as references do, keeps doing so.
    """
    if not isinstance(suite, Family):
        return open_family(suite, device, precision or "exact")
    if precision is None or suite.compute.dtype is torch.float64:
        return suite
    return replace(suite, compute=Compute(suite.compute.device, PRECISIONS[precision]))


def _open_checked(folder: Path, label: str, adapter: Adapter, device: torch.device) -> Checkpoint:
    """A checkpoint that is a model of the adapter's architecture; InputError listing every difference."""
    weights = Checkpoint(folder, label, adapter.canonical)
    problems = differences(adapter, weights)
    if not problems:
        theirs = adapter_for(weights.config, weights.info, device, label).settings
        problems = [
            f"{label}: {name} is {theirs[name]!r} in {folder / 'config.json'}, the base has {value!r}"
            for name, value in adapter.settings.items()
            if theirs[name] != value
        ]
    problems += [
        f"{label}: '{stored}' must repeat '{name}' but holds other values ({folder})"
        for stored, name in adapter.aliases.items()
        if stored in weights.left_out and name in weights.info and not weights.repeats(stored, name)
    ]
    report_all(problems)
    return weights


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
    problems += [
        f"{weights.label}: tensor '{name}' holds {found[name].dtype}, weights are floating-point"
        for name in expected
        if name in found and not found[name].dtype.is_floating_point
    ]
    return problems


def report_all(problems: Sequence[str]) -> None:
    """Raise one InputError that lists every problem; nothing if there is none."""
    if problems:
        raise InputError(*problems)


def batches_of(samples: Samples, size: int, device: torch.device) -> list[Batch]:
    """The samples' model inputs in batches of `size`, on the device."""
    return [
        {name: tensor[start : start + size].to(device) for name, tensor in samples.inputs.items()}
        for start in range(0, len(samples), size)
    ]


def _some(names: Sequence[str], most: int = 4) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
