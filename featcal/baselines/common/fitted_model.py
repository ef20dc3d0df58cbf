"""Save the model of a baseline with the record of how it was made."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featcal.baselines.common.baseline import Baseline
from featcal.baselines.common.fold_heads import describe_heads, foldable, locate_task, write_heads
from featcal.baselines.common.task_adapters import adapted_by_task, describe_adapters, write_adapters
from featcal.export.card import CardProvenance, model_card
from featcal.export.kept_work import require_checked
from featcal.export.licences import licence_conflicts, read_licences
from featcal.export.record_facts import input_hashes
from featcal.export.to_model import to_library_model
from featcal.export.write import require_weights_alone, write_model
from featcal.family.ancestry import check_lineage
from featcal.family.opening import Family
from featcal.family.outside_tower import note_left_out
from featcal.formats.hub import ADAPTERS, HEADS
from featcal.formats.located_model import Located
from featcal.formats.output import OutputFolder
from featcal.formats.weights import Weights
from featcal.system.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAMED = "calibration"
"""Split whose samples name the classes if the suite file does not."""


@dataclass(frozen=True)
class Fitted:
    """A model that a baseline made from a suite."""

    family: Family
    """Suite of the models; its merged model is the start of a method that acts on a model."""
    options: Baseline
    weights: Weights
    """The fitted weights; every function that takes a model accepts them."""
    record: Mapping[str, Any]
    """suite and its file, model (its name), of (the model that was acted on), options, tasks (samples, truncated,
    indices, hash), seconds, peak memory, versions, machine."""

    @property
    def _container(self) -> Located:
        """Return the files that give a written model its layout and companions."""
        return self.family.container if self.options.on_another else self.family.origin

    def _command(self, task: str | None) -> Callable[[str], str]:
        """Return the function that writes the command line of this model."""
        one = () if task is None else ("--task", task)
        words = ["--method", str(self.record["model"]), *one, "--out", "merged"]
        return lambda suite: shlex.join(["featcal", "merge", suite, *words])

    def to_model(self) -> PreTrainedModel:
        """Return the model as the library's own class, in eval mode: bit for bit what `from_pretrained` loads from the
        folder that `save` writes. It shares no memory with this one.

        Raises:
            InputError: a model of another library than transformers, or one with maps or heads of its own.
        """
        return to_library_model(self.family, self._container, self.weights)

    def save(self, out: str | Path, task: str | None = None) -> dict[str, Any]:
        """Write a folder that `from_pretrained` loads, with card and `featcal.json`; returns the record with `out`.

        Maps of final features that are affine are multiplied into the heads after them (`folded`): of all tasks, in
        files of their own. Adapters per task are folders of their own (`adapters`).

        Args:
            task: write the model with this task's head alone, in a folder like that of the task's expert.

        Raises:
            InputError: `out` exists or cannot be written, an expert that does not come from the base, or a model that
                is more than its weights and such maps; a `task` of a model without maps, or whose expert has no folder
                with a head of its own.
            NumericalError: the folder does not load back to the same model.
            UncheckedError: it is written, but could not be verified.
        """
        mapped, adapted = foldable(self.weights), adapted_by_task(self.weights)
        beside = mapped or adapted
        weights = self.weights if beside is None else beside.under
        require_weights_alone(weights)
        family, settings = self.family, dict(self.record["options"])
        container = self._container
        licences = read_licences(family)
        notes = [*check_lineage(family), *(note_left_out(family).values() if container is family.origin else ())]
        notes += licence_conflicts(licences)
        record = {**self.record, "inputs": input_hashes(family), "licences": licences, "notes": notes}
        about = self.options.about
        what = (
            f"`{self.options.kind}`: {about.summary}{about.link and f' ({about.link})'}. A baseline beside calibration."
        )
        title = f"{family.suite.name}, {self.options.kind}"
        if task is not None:
            if mapped is None:
                raise InputError(
                    f"{self.options.name}: it is one model for all tasks; only models with maps can be written for a "
                    "single task"
                )
            container = locate_task(family, mapped, task, _NAMED)
            title, record["task"] = f"{title}, {task}", task
        with OutputFolder(out) as folder:
            if mapped is not None and task is None:
                record[HEADS] = write_heads(folder.model, family, mapped, _NAMED)
                what = f"{what} {describe_heads(family)}"
            if adapted is not None:
                record[ADAPTERS] = write_adapters(folder.model, family, container, adapted)
                what = f"{what} {describe_adapters()}"
            card = model_card(family, record, CardProvenance(title, what, settings, self._command(task)))
            content = write_model(folder, family.adapter, container, weights, lambda: record, card)
        return require_checked({"out": str(folder.out), **content})
