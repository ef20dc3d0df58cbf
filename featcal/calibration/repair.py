"""Write the change of a calibration as a small adapter over the merge, or over the base."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from featcal.calibration.deployed_inputs import DeployedInputs, map_changes
from featcal.calibration.low_rank import Limits, Truncation, truncate
from featcal.calibration.store import prefix_errors
from featcal.calibration.token_rows import lane_rows
from featcal.export.adapter_card import adapter_card, start_on_hub
from featcal.export.adapter_files import LowRankDifference, Written, require_adaptable, write_adapter
from featcal.export.licences import licence_conflicts, read_licences
from featcal.export.record_facts import input_hashes
from featcal.export.write import with_notes
from featcal.family.opening import Family
from featcal.formats.hub import CARD_FILE, RECORD_FILE
from featcal.formats.low_rank import Adapted, Factors
from featcal.formats.output import OutputFolder, save_text
from featcal.formats.peft import CONFIG_FILE, WEIGHT_FILE
from featcal.formats.weights import Overlay, Weights
from featcal.models.adapter import Block, Stage, walking
from featcal.models.lane import ExpertPass
from featcal.models.walk import BlockwiseForward
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.facts import suite_facts
from featcal.system.environment import machine_facts
from featcal.system.errors import InputError
from featcal.system.formatting import some
from featcal.system.progress import Progress, silent
from featcal.system.versions import all_versions

Start = Literal["merged", "base"]
"""The model under an adapter: the calibrated merge, or the base."""


@dataclass(frozen=True)
class MapCut:
    """The truncation of the change of one linear map."""

    layer: str
    map: str
    """Name of the linear map inside the block."""
    rank: int
    full: int
    """The largest rank that the map could have."""
    left_out: float
    """tr((D - B A) H (D - B A)^T), see `low_rank`."""
    total: float
    """Effect of the whole change on the inputs, tr(D H D^T)."""

    @classmethod
    def from_truncation(cls, layer: str, name: str, found: Truncation) -> MapCut:
        (rows, rank), columns = found.up.shape, found.down.shape[1]
        return cls(layer, name, rank, min(rows, columns), found.left_out, found.total)

    def to_json(self) -> dict[str, Any]:
        entry = asdict(self)
        return entry | {"left_out": self.left_out / self.total, "total": self.total}


@dataclass(frozen=True)
class RepairAdapter:
    """A calibrated model as an adapter over another model."""

    family: Family
    over: Start
    start: Weights
    end: Weights
    """The calibrated model."""
    products: Mapping[str, Factors]
    """Products of low rank by canonical name of the weight, in its storage dtype."""
    whole: Mapping[str, Tensor]
    """All other tensors that differ, with the calibrated model's values."""
    cuts: Sequence[MapCut]
    """Cuts of every map that differs, blocks in forward order."""
    config: CalibrationConfig
    """Options of the calibration."""
    limits: Limits

    @property
    def weights(self) -> Weights:
        """Return the model that the adapter makes of its start."""
        under = Overlay(self.start.label, self.start, self.whole)
        label = f"{self.start.label} with a repair"
        return Adapted(label, under, self.products, self.family.adapter.transposed_weights)

    @property
    def difference(self) -> LowRankDifference:
        """Return the content of the adapter's files."""
        return LowRankDifference(self.start, self.weights, self.products, [*self.whole])

    def layers(self) -> list[dict[str, Any]]:
        """Return one row per block: layer, maps, smallest and largest rank, the lost share of the change (by its effect
        on the inputs), and the maps one by one."""
        names = dict.fromkeys(one.layer for one in self.cuts)
        return [_summary(layer, [one for one in self.cuts if one.layer == layer]) for layer in names]

    @property
    def lost_share(self) -> float:
        """Return the share of the change that all maps lose together."""
        return left_out_share(self.cuts)

    def save(self, out: str | Path, base_model: str | None = None) -> dict[str, Any]:
        """Write a folder that peft loads over the start, with card and `featcal.json`; returns the record with `out`.

        Args:
            base_model: name of the start for users of the adapter, such as a repository of the Hub; None for the
                suite's own reference, if that is on the Hub.

        Raises:
            InputError: `out` exists or cannot be written, or an adapter cannot hold a tensor that differs.
            NumericalError: the adapter, read back, does not reproduce the model.
        """
        family, named = self.family, start_on_hub(self.family, self.over)
        base_model = base_model or (named.ref if named else None)
        container = family.origin if self.over == "base" else family.container
        licences = read_licences(family)
        with OutputFolder(out) as folder:
            written = write_adapter(folder.model, family.adapter, container, self.difference, base_model)
            record: dict[str, Any] = {
                "command": "export",
                "suite": family.suite.name,
                "suite_file": suite_facts(family.suite),
                "model": family.merged_name,
                "config": asdict(self.config),
                "adapter": {
                    "of": self.over, **asdict(self.limits), "left_out": self.lost_share, "base_model": base_model,
                    "whole": written.whole,
                },
                "layers": self.layers(),
                "bytes": (folder.model / WEIGHT_FILE).stat().st_size,
                "inputs": input_hashes(family),
                "licences": licences,
                "notes": [*licence_conflicts(licences), *_notes(written)],
                "versions": all_versions(),
                "machine": machine_facts(family.compute.device),
            }  # fmt: skip
            card = adapter_card(family, record, family.adapter.loader(container.config))
            save_text(with_notes(card, record["notes"]), folder.model / CARD_FILE)
            record["written"] = sorted([CONFIG_FILE, WEIGHT_FILE, CARD_FILE, RECORD_FILE])
            save_text(json.dumps(record, indent=2, allow_nan=False) + "\n", folder.model / RECORD_FILE)
            folder.commit()
        return {"out": str(folder.out), **record}


def fit_repair(
    family: Family,
    model: Weights,
    config: CalibrationConfig,
    passes: Mapping[str, ExpertPass],
    over: Start,
    limits: Limits,
    progress: Progress = silent,
) -> RepairAdapter:
    """Truncate the change from the merged model, or from the base, to a calibrated model to a low rank, map by map.

    The metric is that of the calibration's own objective: second moments of the inputs of the finished model's maps,
    tasks weighted by Eq. (14), and its ridge. One block of each model is in memory at a time.

    Args:
        family: its merged model is the one that was calibrated.
        model: the calibrated one.
        config: options of the calibration, for samples, token weights, lam and eps.
        passes: the calibration samples of its tasks.

    Raises:
        InputError: an architecture that peft cannot adapt, or a model without any change.
        NumericalError: features that are not finite.
    """
    require_adaptable(family.adapter)
    start = family.merged if over == "merged" else family.base
    fit = _Fit(family, start, model, config, limits)
    own = {task: one.copy_for_one_walk(model) for task, one in passes.items()}
    run = family.run(progress)
    with walking(run.adapter), run.seconds("adapter"), torch.no_grad():
        walk = BlockwiseForward(run, "cutting to a low rank", own, {})
        for stage in run.adapter.stages:
            walk.enter(stage)
            rows = lane_rows(stage, walk.experts, own, config)
            for index, block in walk.blocks(stage):
                inputs = DeployedInputs(stage, index, config)
                tensors = block.local(run.compute.move(model.read(block.names)))
                for task, lane in walk.experts.items():
                    with prefix_errors(f"{run.adapter.name_of(block)}, task '{task}'"):
                        steps = lane.walk(stage, block, tensors, inputs=[*block.linears])
                        inputs.count((step.inputs for step in steps), rows[task])
                fit.cut(stage, block, inputs)
        walk.finish()
    found = fit.finish()
    if not (found.products or found.whole):
        raise InputError(f"{model.label} is the same as {start.label}, so there is nothing that an adapter could hold")
    return found


class _Fit:
    """An adapter under construction."""

    def __init__(self, family: Family, start: Weights, model: Weights, config: CalibrationConfig, limits: Limits):
        self._family, self._start, self._model, self._config, self._limits = family, start, model, config, limits
        self._products: dict[str, Factors] = {}
        self._whole: dict[str, Tensor] = {}
        self._cuts: list[MapCut] = []

    def cut(self, stage: Stage, block: Block, inputs: DeployedInputs) -> None:
        """Truncate the changes of one block."""
        layer = self._family.adapter.name_of(block)
        before, after = (block.local(one.read(block.names)) for one in (self._start, self._model))
        with prefix_errors(layer):
            products, cuts = cut_changes(layer, inputs, before, after, self._limits)
        self._cuts += cuts
        self._products |= {f"{block.stored_name(name)}.weight": one for name, one in products.items()}
        self._take_whole(name for name in block.names if name not in self._products)

    def finish(self) -> RepairAdapter:
        """Add the tensors outside the blocks."""
        inside = {name for block in self._family.adapter.blocks() for name in block.names}
        self._take_whole(name for name in self._family.adapter.tower if name not in inside)
        over: Start = "merged" if self._start is self._family.merged else "base"
        found = self._products, self._whole, self._cuts
        return RepairAdapter(self._family, over, self._start, self._model, *found, self._config, self._limits)

    def _take_whole(self, names: Iterator[str]) -> None:
        for name in names:
            before, after = (one.read([name])[name] for one in (self._start, self._model))
            if not torch.equal(before, after):
                self._whole[name] = after


def cut_changes(
    layer: str, inputs: DeployedInputs, start: Mapping[str, Tensor], end: Mapping[str, Tensor], limits: Limits
) -> tuple[dict[str, Factors], list[MapCut]]:
    """Truncate the changes of all linear maps of a block that differ.

    Args:
        inputs: of these maps.
        start, end: tensors of the block by name inside it.

    Returns:
        B and A by the name of the map inside the block, in its storage dtype; and the losses.
    """
    products: dict[str, Factors] = {}
    cuts: list[MapCut] = []
    for metric in inputs.metrics():
        for name, change in map_changes(metric.group, start, end):
            with prefix_errors(name):
                found = truncate(change.to(metric.matrix.device), metric.matrix, limits)
            stored = start[f"{name}.weight"]
            products[name] = found.up.to(stored).contiguous(), found.down.to(stored).contiguous()
            cuts.append(MapCut.from_truncation(layer, name, found))
    return products, cuts


def _summary(layer: str, own: Sequence[MapCut]) -> dict[str, Any]:
    ranks = [one.rank for one in own]
    return {
        "layer": layer,
        "rank": [min(ranks), max(ranks)],
        "left_out": left_out_share(own),
        "maps": [one.to_json() for one in own],
    }


def left_out_share(cuts: Sequence[MapCut]) -> float:
    """Return the share of the change, by its effect on the inputs, that some maps lose together, 0-1."""
    total = sum(one.total for one in cuts)
    return sum(one.left_out for one in cuts) / total if total else 0.0


def _notes(written: Written) -> list[str]:
    """Return notes on the content of an adapter besides products of low rank."""
    notes = []
    if written.whole:
        what = some(written.whole)
        notes.append(f"saved whole, since they are no linear maps: {what}; servers that load maps alone refuse them")
    if not written.switchable:
        notes.append(
            "not all adapted maps have a bias, so biases are stored whole; peft keeps them when it switches off"
        )
    return notes
