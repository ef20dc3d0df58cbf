"""Check what must hold for every architecture: each check takes a trial (a tiny suite) and
returns what it measured, or raises AssertionError.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from featcal.calibration.calibrate import calibrate_family
from featcal.calibration.config import idle_options
from featcal.formats.load_pretrained import load_pretrained
from featcal.models.adapter import Call, walking
from featcal.models.lane import run_block
from featcal.session.api import measure_drift
from featcal.suite.calibration_options import INFORMED, PAPER, CalibrationConfig
from featcal.testing.reference import refine
from featcal.testing.trial import TASKS, Trial, assert_that

CheckNumbers = Mapping[str, float]
CLOSE = 1e-4
"""Largest relative deviation of a calibrated tensor from the second computation, and of outputs from the library's."""


def check_block_replay(trial: Trial) -> CheckNumbers:
    """Check that featcal, block by block on padded batches, computes the states and scores of the library's own
    forward.

    The library uses its plainest attention, so an attention option that featcal's kernels lack makes a difference.
    """
    family, found, of_head = trial.family, defaultdict[str, list[float]](list), list[float]()
    (stage,) = family.adapter.stages
    for folder, model in {"base": family.base, f"experts/{TASKS[0]}": family.experts[TASKS[0]]}.items():
        # In float64 the library's plain attention gives NaN under padding which looks nowhere.
        library, inputs = trial.library(folder, torch.float32), trial.padded_inputs(TASKS[1])
        states, scores = _library_states(trial, library, inputs)
        place = family.compute.place
        with walking(family.adapter):
            call: Call = stage.first_call(place(model.read(stage.outer)), inputs, None)
            for block in stage.blocks:
                call = run_block(stage, block, block.local(place(model.read(block.names))), call)
                apart = stage.state(call, inputs) - stage.state(call.with_state(states[block.path]), inputs)
                found[block.name].append(float(apart.norm() / stage.state(call, inputs).norm()))
        of_head.append(_relative_distance(trial.compute_scores(model, inputs), scores))
    replayed = _require(found, CLOSE, "replayed states differ from the library's own forward")
    what = "every state is the library's own, and yet the scores differ: the facts do not describe the head"
    return {**replayed, **_require({"scores": of_head}, CLOSE, what)}


@torch.no_grad()
def _library_states(trial: Trial, model: Any, inputs: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """Return the library's state after every block, and its scores of every sample."""
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_: Any, __: Any, output: Any) -> None:
            seen[name] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [model.get_submodule(name).register_forward_hook(keep(name)) for name in trial.blocks]
    scores = trial.scores(model, inputs)
    for handle in handles:
        handle.remove()
    return seen, scores


def check_paper(trial: Trial) -> CheckNumbers:
    """Check that every tensor that Algorithm 1 calibrates equals that of the second computation."""
    return _compare_calibration(trial, trial.config())


def check_norms(trial: Trial) -> CheckNumbers:
    """Check Algorithm 1 with a ridge of 1e-5, and with the scales of all norms (not only
    LayerNorms) and the routers of mixtures calibrated.
    """
    return _compare_calibration(trial, trial.config(**_extensions(trial), lam=1e-5))


def check_informed(trial: Trial) -> CheckNumbers:
    """Check every tensor of the recipe "informed", which solves a block by its residual parts, like "refined", and
    adds a prior to every map; with routers of mixtures, so that an expert gets the tokens that the solved router
    sends.
    """
    return _compare_calibration(trial, trial.config(**_extensions(trial), recipe=INFORMED))


def _extensions(trial: Trial) -> dict[str, bool]:
    """Return the tensors that are calibrated only on request, if the architecture has any."""
    return {name: name not in idle_options(trial.family.adapter) for name in ("rmsnorms", "routers")}


def _compare_calibration(trial: Trial, config: CalibrationConfig) -> CheckNumbers:
    samples = {task: trial.single_samples(task) for task in TASKS}
    weights, pieces = trial.token_weights(config), trial.pieces(config)
    theirs = trial.canonical(refine(trial.models, trial.experts, samples, pieces, trial.options(config), weights))
    tower = trial.family.adapter.tower
    ours = calibrate_family(trial.family, config).weights.read(tower)
    merged = trial.family.merged.read(tower)
    unknown = theirs.keys() - ours.keys()
    assert_that(
        bool(theirs) and not unknown,
        f"the second computation calibrates tensors that featcal does not know: {sorted(unknown)}",
    )
    # To the bit: what is not calibrated is copied, never computed.
    touched = [name for name in tower if name not in theirs and not ours[name].equal(merged[name])]
    assert_that(not touched, f"tensors that should stay as merged do not: {touched}")
    found = {name: [_relative_distance(ours[name], right)] for name, right in theirs.items()}
    return _require(found, CLOSE, f"calibrated tensors differ from the second computation ({config.recipe})")


def check_fixed_point(trial: Trial) -> CheckNumbers:
    """Check that every recipe returns the same model where base, merged model and experts are one model."""
    family = trial.exact
    same = replace(family, merged=family.base, experts=dict.fromkeys(family.experts, family.base))
    found = defaultdict[str, list[float]](list)
    for recipe in ({"recipe": PAPER}, {"recipe": INFORMED}):
        # eps 0: the stabiliser stands on the left side alone and would shrink even an exact solution.
        done = calibrate_family(same, trial.config(**_extensions(trial), eps=0.0, **recipe)).weights
        for name, tensor in same.base.read(family.adapter.tower).items():
            found[name].append(_relative_distance(done.read([name])[name], tensor))
    return _require(found, 1e-6, "identical models are not a fixed point")


def check_drift(trial: Trial) -> CheckNumbers:
    """Check that e = m + p for every sample, with states computed a second time, alone and in float64; that a
    block's mismatch is the sum of its sublayers'; and that contributions add up to the drift.
    """
    whole = measure_drift(trial.exact, split="test", attribution=True)
    parts = measure_drift(trial.exact, split="test", sublayers=True)
    found = defaultdict[str, list[float]](list)
    last = trial.facts.parts[-1].name
    for task, one in whole.tasks.items():
        assert one.attribution is not None
        found["identity"].append(one.identity_residual)
        found["shares"].append(abs(float(one.attribution.shares.sum()) - 1))
        ends = {layer.layer: layer.drift for layer in parts.tasks[task].layers}
        for layer in one.layers:
            end = ends.get(f"{layer.layer} {last}", ends.get(layer.layer, torch.tensor(torch.nan)))
            found["sublayers"].append(_relative_distance(end, layer.drift))
    return _require(found, 1e-6, "the drift identity does not hold")


def check_repair(trial: Trial) -> CheckNumbers:
    """Check that calibration lowers the final drift of every task; that the library loads the written folder with
    every tensor and equal outputs; and that names, dtypes and other files are those of the merged model's folder.
    """
    family, out = trial.family, trial.root / "written"
    calibrate_family(family, trial.config()).save(out)
    before, after = (measure_drift(family, one, split="calibration") for one in ("merged", str(out)))
    fallen = {task: after.tasks[task].layers[-1].relative_drift / before.tasks[task].layers[-1].relative_drift
              for task in TASKS}  # fmt: skip
    assert_that(max(fallen.values()) < 1, f"calibration raised the final drift: {fallen}")
    model, report = load_pretrained(trial.model_class, out)
    lost = {kind: sorted(map(str, names)) for kind, names in report.items() if names and "keys" in kind}
    assert_that(not lost, f"the library does not load every tensor of the written folder: {lost}")
    inputs = family.adapter.probe()
    with torch.no_grad():
        scores = trial.scores(model, inputs)
    theirs = trial.compute_scores(family.model(str(out)), inputs)
    own, origin = (_dtypes(trial, folder) for folder in (out, trial.root / "merged"))
    assert_that(
        own == origin, f"names or dtypes changed: {sorted(map(str, set(own.items()) ^ set(origin.items())))[:4]}"
    )
    kept = {file.name for file in (trial.root / "merged").iterdir()} - {file.name for file in out.iterdir()}
    assert_that(not kept, f"files are missing in the written folder: {sorted(kept)}")
    found = {"outputs": [_relative_distance(scores, theirs)]}
    return {**_require(found, CLOSE, "outputs of the written folder differ"), "drift": max(fallen.values())}


def _dtypes(trial: Trial, folder: Any) -> dict[str | None, str]:
    """Return dtypes by canonical name; where the merged model's files leave a prefix out, written files have it."""
    found: dict[str | None, str] = {}
    canonical = trial.family.adapter.canonical
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as handle:
            found |= {canonical(name): handle.get_slice(name).get_dtype() for name in handle.keys()}  # noqa: SIM118
    return found


def _relative_distance(one: Tensor, other: Tensor) -> float:
    """Return ||one - other|| / ||other||, or the norm of the difference if the other is 0."""
    gap, scale = (one - other).double().norm(), other.double().norm()
    return float(gap / scale if scale > 0 else gap)


def _require(found: Mapping[str, list[float]], limit: float, what: str) -> CheckNumbers:
    """Return the largest deviation under each name, NaN if there is one; raise
    AssertionError where it is above the limit.
    """
    worst = {name: float(torch.tensor(gaps).max()) for name, gaps in found.items()}
    wrong = sorted(((gap, name) for name, gap in worst.items() if not gap <= limit), reverse=True)
    # A NaN sorts anywhere, but is always listed: it is not at most the limit.
    listed = ", ".join(f"{name} {gap:.1e}" for gap, name in wrong[:8])
    assert_that(bool(worst) and not wrong, f"{what}, {len(wrong)} of {len(worst)} by more than {limit:g}: {listed}")
    return worst


CHECKS: Mapping[str, Callable[[Trial], CheckNumbers]] = {
    "replay": check_block_replay,
    "paper": check_paper,
    "norms": check_norms,
    "informed": check_informed,
    "fixed_point": check_fixed_point,
    "drift": check_drift,
    "repair": check_repair,
}
"""Every check by its name."""
