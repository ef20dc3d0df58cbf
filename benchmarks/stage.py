"""One calibration by featcal in a process of its own: pictures in memory, weights streamed from their files.

`python benchmarks/stage.py SUITE --samples 32 --precision exact` prints JSON: seconds, the library's own seconds by
stage, the window in which memory counts, and what is needed for a roofline.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import measure
import torch
from roofline import SIDE, gemm_peaks
from safetensors.torch import save_file
from torch import Tensor

from featcal.calibration.calibrate import calibrate_family, config_for, expert_passes
from featcal.evaluation.heads import CosineHead
from featcal.family.opening import Family, open_family
from featcal.models.lane import ExpertPass, WalkCache
from featcal.models.model import Model
from featcal.suite.calibration_options import PAPER, RECIPES, CalibrationConfig
from featcal.suite.schema import load_suite
from featcal.system.progress import keep_memory

Work = Callable[[], tuple[dict[str, Tensor], dict[str, float]]]
"""The timed part: gives the calibrated tensors and seconds by stage."""


def main(prepare: Callable[[Family, CalibrationConfig, str], Work], description: str) -> None:
    """Run the command line of a worker: `prepare` does what is not timed and returns what is."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("suite", type=Path)
    arguments(parser)
    parser.add_argument("--recipe", choices=RECIPES, default=PAPER)
    parser.add_argument("--decisions", type=float, default=0.0, help="with heads of ten random classes")
    parser.add_argument("--weights", type=Path, help="write the calibrated tensors to this safetensors file")
    parser.add_argument("--peaks", action="store_true", help="measure matrix products too, after the calibration")
    options = parser.parse_args()
    if options.again and prepare is not ours:
        parser.error("--again is of featcal alone; the reference has no sessions")
    if options.threads:
        torch.set_num_threads(options.threads)
    family = open_family(load_suite(options.suite), options.device, options.precision)
    device = str(family.compute.device)
    if options.peaks and family.compute.device.type not in SIDE:
        parser.error(f"--peaks is of {' and '.join(SIDE)}, not of {device}")
    chosen = {"recipe": options.recipe, "decisions": options.decisions, "precision": options.precision}
    config = config_for(family, samples=options.samples, **chosen)
    family = with_heads(family) if options.decisions else family
    work = again_after(family, config) if options.again else prepare(family, config, device)
    (tensors, seconds), cost = measure.timed(work, device)
    document = {"by_stage": seconds, **cost, "lam": config.lam, "threads": torch.get_num_threads(), "device": device}
    if options.weights:
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, options.weights)
    if options.peaks:
        document["peaks"] = gemm_peaks(device)
    measure.show({**document, "machine": measure.machine(device)})


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options that a worker and those who start it share."""
    parser.add_argument("--samples", type=int, default=32, help="per task")
    parser.add_argument("--precision", choices=["exact", "fast"], default="exact")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="left out: as many as torch takes")
    parser.add_argument("--again", action="store_true", help="time the second calibration of a session, of featcal")


def with_heads(family: Family) -> Family:
    """The family whose experts have a head each, which the suites of the benchmarks lack."""
    (width,) = {family.merged.info[name].shape[0] for name in family.adapter.closing[:1]}
    table = torch.randn(10, width, generator=torch.Generator().manual_seed(0))
    classes = tuple(map(str, range(len(table))))
    heads = {task: CosineHead(table / table.norm(dim=1, keepdim=True), 1.0, classes) for task in family.experts}
    return replace(family, experts={task: Model(one, heads=heads) for task, one in family.experts.items()})


def ours(family: Family, config: CalibrationConfig, device: str) -> Work:
    """featcal's own calibration."""
    keep_memory()  # as the command line does
    return _calibration(family, config, expert_passes(family, config))


def again_after(family: Family, config: CalibrationConfig) -> Work:
    """featcal's own calibration once more in a session, which keeps what no option changes: as far as there is room,
    expert passes and priors."""
    keep_memory()
    work = _calibration(family, config, expert_passes(family, config, WalkCache.from_device(family.compute.device)))
    work()
    return work


def _calibration(family: Family, config: CalibrationConfig, passes: Mapping[str, ExpertPass]) -> Work:
    def work() -> tuple[dict[str, Tensor], dict[str, float]]:
        result = calibrate_family(family, config, experts=passes)
        calibrated = result.weights.read(name for block in family.adapter.blocks() for name in block.names)
        return calibrated, result.record["seconds"]

    return work


if __name__ == "__main__":
    main(ours, "featcal: one calibration in this process.")
