"""Algorithm 1 as a whole: its invariances, and what the deployed model sees."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from clip_config import clip_config
from command_line import Run
from tiny_clip import BLOCKS, TASKS
from torch import Tensor, nn

import featcal
from featcal.calibration import closed_form
from featcal.calibration.algorithm1 import ForwardOrder, InMemoryBlocks
from featcal.calibration.block_statistics import BlockStatistics, FirstBlock
from featcal.calibration.calibrate import calibrate_family, calibrate_to_folder, config_for, expert_passes
from featcal.calibration.linear_group import LinearGroup
from featcal.calibration.token_rows import TokenRows
from featcal.drift.source import measure_sources
from featcal.family.opening import Family
from featcal.formats.weights import InMemory, Overlay, Weights
from featcal.models.activations import ActivationStore
from featcal.models.adapter import Call
from featcal.models.lane import BlockStep, ExpertPass, ModelStream, StageEntrance, WalkCache, _bytes
from featcal.session.api import measure_drift
from featcal.suite.calibration_options import CalibrationConfig
from featcal.system.errors import InputError, NumericalError

CONFIG = clip_config(samples=12, batch_size=5)


PAGE = Path(featcal.__file__).parent.parent / "docs" / "architecture.md"


def tower(family: Family, weights: Weights) -> dict[str, Tensor]:
    return weights.read(family.adapter.tower)


def calibrated(family: Family, config: CalibrationConfig = CONFIG) -> dict[str, Tensor]:
    return tower(family, calibrate_family(family, config).weights)


def assert_same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], tolerance: float) -> None:
    for name, tensor in theirs.items():
        scale = float(tensor.norm()) or 1.0
        assert float((ours[name] - tensor).norm()) / scale <= tolerance, name


@pytest.fixture(scope="module")
def usual(tiny: Family) -> dict[str, Tensor]:
    """The tower that `CONFIG` gives, in float32."""
    return calibrated(tiny)


@pytest.fixture(scope="module")
def usual64(tiny64: Family) -> dict[str, Tensor]:
    """The tower that `CONFIG` gives, in float64."""
    return calibrated(tiny64)


def test_float32_features_stay_close_to_float64(usual: dict[str, Tensor], usual64: dict[str, Tensor]) -> None:
    assert_same(usual, {n: t.float() for n, t in usual64.items()}, 2e-5)


def test_the_command_comes_to_the_equation_by_the_calls_of_the_architecture_page(
    run: Run, tiny_suite_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stack of the first solve, from the command down, has these calls of featcal and no others; from where the
    room is entered they are four."""
    (path,) = re.findall(r"^From the command to Eq\. \(17\): (.*)\.$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    *steps, equation = (f"featcal.{step}" for step in re.findall(r"`([\w.]+)`", path))
    stack: list[str] = []

    def look(*_: object) -> Tensor:
        frame = sys._getframe(1)
        while (name := f"{frame.f_globals['__name__']}.{frame.f_code.co_qualname}") != steps[0]:
            stack.insert(0, name)
            assert frame.f_back is not None
            frame = frame.f_back
        raise KeyboardInterrupt  # what comes after is not asked for

    monkeypatch.setattr(closed_form, "weight_by_factor", look)
    assert run("calibrate", tiny_suite_file, "--samples", 2, "--out", tmp_path / "out")[0] == 130
    assert equation == "featcal.calibration.closed_form.weight_by_factor"
    assert [name for name in stack if name.startswith("featcal.")] == steps[1:]
    assert steps[1] == "featcal.calibration.calibrate.calibrate_to_folder"
    assert len(steps[1:]) == 4


def test_only_linears_and_layernorms_of_blocks_change(tiny: Family, usual: dict[str, Tensor]) -> None:
    merged, ours = tower(tiny, tiny.merged), usual
    for name in merged:
        changed = not torch.equal(merged[name], ours[name])
        assert changed == ("encoder.layers" in name), name


def test_switches_leave_biases_and_layernorms_as_merged(tiny: Family) -> None:
    merged = tower(tiny, tiny.merged)
    ours = calibrated(tiny, replace(CONFIG, biases=False, layernorms=False))
    changed = {name for name in merged if not torch.equal(merged[name], ours[name])}
    assert changed
    assert all(name.endswith(("proj.weight", "fc1.weight", "fc2.weight")) for name in changed)


def test_batch_split_changes_nothing(tiny64: Family, usual64: dict[str, Tensor]) -> None:
    assert_same(calibrated(tiny64, replace(CONFIG, batch_size=12)), usual64, 1e-11)


def test_task_order_changes_nothing(tiny64: Family, usual64: dict[str, Tensor]) -> None:
    turned = replace(tiny64, experts=dict(reversed(tiny64.experts.items())))
    passes = dict(reversed(expert_passes(tiny64, CONFIG).items()))
    ours = tower(turned, calibrate_family(turned, CONFIG, experts=passes).weights)
    assert_same(ours, usual64, 1e-11)


def test_scale_of_token_weights_changes_nothing(
    tiny64: Family, usual64: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = type(tiny64.adapter.stages[0])
    original = stage.token_weights

    def scaled(self: Any, weighting: str, call: Any, *rest: Any) -> Tensor:
        weights = original(self, weighting, call, *rest)
        return 7.0 * (torch.ones(call.hidden_state.shape[:2], dtype=torch.float64) if weights is None else weights)

    monkeypatch.setattr(stage, "token_weights", scaled)
    assert_same(calibrated(tiny64), usual64, 1e-10)


def test_patch_weight_matters_in_the_last_block_only(tiny: Family, usual: dict[str, Tensor]) -> None:
    ours, other = usual, calibrated(tiny, replace(CONFIG, patch_weight=1.0))
    changed = {name for name in ours if not torch.equal(ours[name], other[name])}
    assert changed
    assert all("layers.2." in name for name in changed)
    assert not any("k_proj" in name or "v_proj" in name for name in changed)


def test_identical_models_are_a_fixed_point(tiny64: Family) -> None:
    same = replace(tiny64, merged=tiny64.base, experts=dict.fromkeys(tiny64.experts, tiny64.base))
    for alpha in (0.0, 0.3, 1.0):
        ours = calibrated(same, replace(CONFIG, alpha=alpha, eps=0.0))
        assert_same(ours, tower(same, same.base), 1e-9)


def test_huge_lam_gives_task_arithmetic_at_rho_times_its_scale(tiny64: Family) -> None:
    ours = calibrated(tiny64, replace(CONFIG, lam=1e10))
    base, merged = tower(tiny64, tiny64.base), tower(tiny64, tiny64.merged)
    for name in (n for n in base if "encoder.layers" in n):
        expected = 2.0 * merged[name] - base[name]
        torch.testing.assert_close(ours[name], expected, rtol=1e-6, atol=1e-8)


def test_deployed_inputs_are_the_stream_that_was_used(tiny64: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eq. (45): forwarding the finished model gives every block the inputs that its moments were taken from."""
    used: list[Tensor] = []
    see = BlockStatistics.see

    def seen(self: BlockStatistics, inputs: Mapping[str, Tensor]) -> None:
        used.append(inputs["layer_norm1"].clone())
        see(self, inputs)

    monkeypatch.setattr(BlockStatistics, "see", seen)
    config = replace(CONFIG, batch_size=12)
    model = calibrate_family(tiny64, config).weights
    stage = tiny64.adapter.stages[0]
    with torch.no_grad():
        for position, expert in enumerate(expert_passes(tiny64, config).values()):
            call = stage.first_call(model.read(stage.outer), expert.batches[0], None)
            for index, block in enumerate(stage.blocks):
                student = used[index * len(TASKS) + position]
                torch.testing.assert_close(call.hidden_state, student, rtol=0, atol=1e-12)
                call = stage.advance(call, block.run(block.local(model.read(block.names)), call))


def test_calibration_lowers_drift_on_its_samples(tiny: Family) -> None:
    config = replace(CONFIG, rho=1.0, lam=1e-3)
    before = measure_drift(tiny, split="calibration").to_json()["tasks"]
    after = measure_drift(tiny, calibrate_family(tiny, config).weights, split="calibration").to_json()["tasks"]
    for task in before:
        assert after[task]["final"]["drift"] < 0.97 * before[task]["final"]["drift"]


@pytest.mark.slow
def test_statistics_of_the_first_block_are_taken_again_where_they_hold(
    tiny: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other option gives the weights of a run of its own, and only lam and rho count one block less."""
    counted: list[int] = []
    end_task = BlockStatistics.end_task

    def ended(self: BlockStatistics, expert: Mapping[str, Tensor], *more: Any, **named: Any) -> None:
        counted[-1] += 1
        end_task(self, expert, *more, **named)

    monkeypatch.setattr(BlockStatistics, "end_task", ended)
    passes, first = expert_passes(tiny, CONFIG, kept=WalkCache(2**30)), FirstBlock()
    all_blocks, tasks = BLOCKS * len(TASKS), len(TASKS)
    for change, walked in (
        ({}, all_blocks),
        ({"rho": 1.2}, all_blocks - tasks),
        ({"lam": 0.5}, all_blocks - tasks),
        ({"lam": 1e-5}, all_blocks),  # products in float64
        ({"alpha": 0.9}, all_blocks),
        ({"layernorms": False}, all_blocks),
        ({"layernorms": False, "biases": False}, all_blocks - tasks),
    ):
        config = replace(CONFIG, **change)
        counted.append(0)
        again = tower(tiny, calibrate_family(tiny, config, experts=passes, first=first).weights)
        assert counted[-1] == walked
        assert_same(again, tower(tiny, calibrate_family(tiny, config).weights), 0.0)


def test_statistics_of_the_first_block_are_not_those_of_another_merge(tiny: Family) -> None:
    """The same options and the very same expert passes: only the merged model is another one."""
    passes, first = expert_passes(tiny, CONFIG, kept=WalkCache(2**30)), FirstBlock()
    calibrate_family(tiny, CONFIG, experts=passes, first=first)
    other = replace(tiny, merged=tiny.base)
    again = tower(other, calibrate_family(other, CONFIG, experts=passes, first=first).weights)
    assert_same(again, calibrated(other), 0.0)


def test_statistics_of_the_first_block_survive_a_failed_solve_and_an_overtaken_run(tiny: Family) -> None:
    """Float64 sums are solved twice; a solve that fails and a run that ends in the second block spoil nothing."""

    class Overtaken(Exception):
        pass

    def stop(_: str, done: int, __: int) -> None:
        if done == 1:
            raise Overtaken

    careful = replace(CONFIG, samples=1, eps=0.0)  # fewer tokens than channels
    passes, first = expert_passes(tiny, careful, kept=WalkCache(2**30)), FirstBlock()
    with pytest.raises(NumericalError, match="not positive definite"):
        calibrate_family(tiny, replace(careful, lam=0.0), experts=passes, first=first)
    for lam in (1e-4, 1e-5):
        with pytest.raises(Overtaken):
            calibrate_family(tiny, replace(careful, lam=lam, rho=1.5), experts=passes, first=first, progress=stop)
        again = calibrate_family(tiny, replace(careful, lam=lam), experts=passes, first=first)
        assert_same(
            tower(tiny, again.weights), tower(tiny, calibrate_family(tiny, replace(careful, lam=lam)).weights), 0.0
        )


def test_statistics_of_the_first_block_without_room_for_the_experts(tiny: Family) -> None:
    """Experts are then walked anew where nothing is counted."""
    passes, first = expert_passes(tiny, CONFIG, kept=WalkCache(0)), FirstBlock()
    for rho in (1.0, 1.5):
        config = replace(CONFIG, rho=rho)
        again = calibrate_family(tiny, config, experts=passes, first=first)
        assert_same(tower(tiny, again.weights), tower(tiny, calibrate_family(tiny, config).weights), 0.0)


def test_first_calls_of_a_model_are_made_once_for_the_same_tensors(tiny: Family) -> None:
    held, stage = tiny.resident(), tiny.adapter.stages[0]
    expert = next(iter(expert_passes(held, CONFIG, kept=WalkCache(2**30)).values()))

    def entered(one: ExpertPass, model: Weights) -> list[Call]:
        front = StageEntrance.from_model(stage, model, held.compute)
        return [entry.first for entry in one.lane(ActivationStore(), model).enter(front)]

    merged, base = entered(expert, held.merged), entered(expert, held.base)
    for calls, model in ((merged, held.merged), (base, held.base)):
        placed = held.compute.place(model.read(stage.outer))
        for call, batch in zip(calls, expert.batches, strict=True):
            assert call.hidden_state.equal(stage.first_call(placed, batch, None).hidden_state)
    again = entered(expert, held.base)
    assert all(one is other for one, other in zip(again, base, strict=True))
    turned = entered(replace(expert, batches=expert.batches[::-1]), held.base)  # other samples in the same room
    assert all(one.hidden_state.equal(own.hidden_state) for one, own in zip(turned, base[::-1], strict=True))
    poor = replace(expert, kept=WalkCache(0))
    pairs = zip(entered(poor, held.base), entered(poor, held.base), strict=True)
    assert all(one is not other for one, other in pairs)


def test_kept_expert_passes_give_the_same_weights_again(tiny: Family, usual: dict[str, Tensor]) -> None:
    passes = expert_passes(tiny, CONFIG, kept=WalkCache(2**30))
    first = tower(tiny, calibrate_family(tiny, CONFIG, experts=passes).weights)
    calibrate_family(tiny, replace(CONFIG, lam=1.0), experts=passes)
    again = tower(tiny, calibrate_family(tiny, CONFIG, experts=passes).weights)
    assert_same(again, first, 0.0)
    assert_same(first, usual, 0.0)


def test_kept_pass_survives_an_interruption(tiny: Family, usual: dict[str, Tensor]) -> None:
    passes = expert_passes(tiny, CONFIG, kept=WalkCache(2**30))

    def stop_at(block: int) -> Any:
        def progress(label: str, done: int, total: int) -> None:
            if done == block:
                raise KeyboardInterrupt

        return progress

    for block in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            calibrate_family(tiny, CONFIG, experts=passes, progress=stop_at(block))
    assert_same(tower(tiny, calibrate_family(tiny, CONFIG, experts=passes).weights), usual, 0.0)


def test_interrupted_run_resumes_to_the_same_weights(tiny: Family, usual: dict[str, Tensor], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    def stop(label: str, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        calibrate_to_folder(tiny, CONFIG, out, progress=stop)
    assert not out.exists()
    assert not list(tmp_path.glob("out.partial/*.safetensors"))  # nothing that loads
    moved = replace(tiny, origin=replace(tiny.origin, config={**tiny.origin.config, "layer_norm_eps": 0.3}))
    with pytest.raises(InputError, match=r"from a run with other 'configurations'; remove it"):
        calibrate_to_folder(moved, CONFIG, out, resume=True)
    with pytest.raises(InputError, match=r"from a run with other 'config lam'; remove it"):
        calibrate_to_folder(tiny, replace(CONFIG, lam=2.0), out, resume=True)
    document = calibrate_to_folder(tiny, CONFIG, out, resume=True)
    assert list(document["relative_drift"]) == tiny.adapter.block_layers()
    written = load_file(out / "model.safetensors")
    assert_same({n: written[n] for n in tiny.adapter.tower}, usual, 0.0)
    assert not list(tmp_path.glob("*.partial"))


def test_lam_zero_without_enough_data_names_the_module(tiny: Family) -> None:
    with pytest.raises(NumericalError, match=r"block \d.*not positive definite.*raise lam"):
        calibrate_family(tiny, replace(CONFIG, lam=0.0, eps=0.0, samples=1))


def test_solution_that_overflows_storage_is_refused(tiny: Family) -> None:
    name = "vision_model.encoder.layers.0.mlp.fc2.weight"
    merged = tiny.merged.read(tiny.adapter.tower)
    half = {n: t.half() for n, t in merged.items()}
    huge = {**tiny.experts["pets"].read(tiny.adapter.tower)}
    huge[name] = huge[name] * 1e8
    broken = replace(
        tiny,
        merged=InMemory("merged", half),
        experts={**tiny.experts, "pets": Overlay("expert", InMemory("expert", huge), {})},
    )
    with pytest.raises(NumericalError, match=r"fc2\.weight.*float16"):
        calibrate_family(broken, CONFIG)


@pytest.mark.parametrize(("lam", "tolerance"), [(1e-5, 2e-8), (0.05, 1e-5)])
@pytest.mark.parametrize("outputs", [8, 40])
def test_every_route_gives_the_same_target(outputs: int, lam: float, tolerance: float) -> None:
    """The targets are formed from mixed inputs, from the expert's outputs, or token by token: all are W_i C_i."""
    torch.manual_seed(0)
    module, config = nn.Linear(32, outputs), CalibrationConfig(lam=lam, alpha=0.15)
    weight, x, x_expert = torch.randn(outputs, 32), torch.randn(24, 32), torch.randn(24, 32)
    expert = {"map.weight": weight, "map.bias": torch.randn(outputs)}
    own = nn.functional.linear(x_expert.double(), *(t.double() for t in expert.values())).float()
    trace = BlockStep(Call((x,), {}), Call((x,), {}), {"map": x_expert}, {"map": own})
    mixed = 0.15 * x_expert.double() + 0.85 * x.double()
    right = weight.double() @ mixed.mT @ x.double() / 24
    right /= torch.linalg.matrix_norm(x.double().mT @ x.double() / 24)
    for route in ("inputs", "outputs", "mixed"):
        group = LinearGroup(["map"], "all", {"map": module})
        group.route = lambda _, route=route: route  # type: ignore[method-assign, misc, assignment]
        group.update({"map": x}, trace, expert, TokenRows.from_weights(None, 24), 24, config)
        group.end_task(expert, config)
        target = group._sums.target  # type: ignore[union-attr]
        assert float((target - right).norm() / right.norm()) < tolerance, route


@pytest.mark.parametrize(("outputs", "tokens", "route"), [(40, 100, "inputs"), (8, 1000, "outputs"), (8, 24, "mixed")])
def test_the_cheapest_route_is_taken(outputs: int, tokens: int, route: str) -> None:
    group = LinearGroup(["map"], "all", {"map": nn.Linear(32, outputs)})
    assert group.route(tokens) == route


@pytest.mark.parametrize("option", ["rmsnorms", "completion_only"])
def test_an_option_that_means_nothing_here_is_refused(tiny: Family, option: str) -> None:
    with pytest.raises(InputError, match=f"{option}: a clip model is not affected by this option"):
        config_for(tiny, **{option: True})
    assert config_for(tiny, **{option: False}) == config_for(tiny)


@pytest.mark.parametrize("room", [0, 200_000, 2**30])
def test_whatever_room_is_kept_the_weights_are_the_same(tiny: Family, usual: dict[str, Tensor], room: int) -> None:
    held, kept = tiny.resident(), WalkCache(room)
    passes = expert_passes(held, CONFIG, kept)
    for _ in range(2):
        assert_same(tower(held, calibrate_family(held, CONFIG, experts=passes).weights), usual, 0.0)
    walked = sum(len(key) == 2 for key in kept._entries)  # blocks; first calls have a longer key
    blocks = len(TASKS) * len(tiny.adapter.blocks())
    assert {0: walked == 0, 2**30: walked == blocks}.get(room, 0 < walked < blocks)


def test_a_pass_that_is_walked_once_lets_its_pictures_go(tiny: Family) -> None:
    passes = expert_passes(tiny, CONFIG)
    calibrate_family(tiny, CONFIG, experts=passes)
    assert not any("pixel_values" in batch for one in passes.values() for batch in one.batches)
    with pytest.raises(InputError, match="can be used only once"):
        calibrate_family(tiny, CONFIG, experts=passes)
    kept = expert_passes(tiny, CONFIG, WalkCache(0))
    calibrate_family(tiny, CONFIG, experts=kept)
    assert all("pixel_values" in batch for one in kept.values() for batch in one.batches)


def test_features_whose_norm_overflows_are_an_error_not_a_task_left_out() -> None:
    """Squares of 3e9 are finite in float32, the norm of their sums is not."""
    config, expert = clip_config(), {"map.weight": torch.eye(32), "map.bias": torch.zeros(32)}
    group = LinearGroup(["map"], "all", {"map": nn.Linear(32, 32)})
    for scale in (1.0, 3e9):
        x = scale * torch.ones(24, 32)
        trace = BlockStep(Call((x,), {}), Call((x,), {}), {"map": x}, {"map": x})
        group.update({"map": x}, trace, expert, TokenRows.from_weights(None, 24), 24, config)
        group.end_task(expert, config)
    with pytest.raises(NumericalError, match="not finite"):
        group.solve(expert, expert, config)


def test_targets_that_overflow_beside_finite_inputs_are_an_error_with_their_maps() -> None:
    """Outputs of 1e37 are finite, and so are their sums; their products with inputs of 100 are not."""
    config, expert = clip_config(), {"map.weight": torch.eye(32), "map.bias": torch.zeros(32)}
    group, x = LinearGroup(["map"], "all", {"map": nn.Linear(32, 32)}), 100 * torch.ones(24, 32)
    trace = BlockStep(Call((x,), {}), Call((x,), {}), {"map": x}, {"map": 1e37 * torch.ones(24, 32)})
    group.update({"map": x}, trace, expert, TokenRows.from_weights(None, 24), 24, config)
    group.end_task(expert, config)
    assert bool(group.finite())
    assert bool(group.sums.gram.norm().isfinite())
    with pytest.raises(NumericalError, match="map: features are not finite"):
        group.solve(expert, expert, config)


def test_experts_run_once_for_many_calibrations_of_models_in_files(
    tiny: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of a file are other objects at every read; what experts left behind is found all the same."""
    stepped: list[bool] = []
    walk = ModelStream._walk

    def counted(lane: ModelStream, *rest: Any) -> Iterator[BlockStep]:
        stepped.append(lane._fixed)
        return walk(lane, *rest)

    monkeypatch.setattr(ModelStream, "_walk", counted)
    passes = expert_passes(tiny, CONFIG, WalkCache(2**30))
    for round_, lam in enumerate((0.05, 0.5, 5.0)):
        stepped.clear()
        calibrate_family(tiny, replace(CONFIG, lam=lam), experts=passes)
        assert sum(stepped) == (0 if round_ else BLOCKS * len(TASKS))


def test_progress_is_told_before_every_block_and_at_the_end(tiny: Family) -> None:
    told: list[tuple[str, int, int]] = []
    run = tiny.run(lambda *said: told.append(said))
    ForwardOrder(run, expert_passes(tiny, CONFIG), CONFIG, InMemoryBlocks()).calibrate()
    assert [(done, total) for _, done, total in told] == [(done, BLOCKS) for done in range(BLOCKS + 1)]
    assert len({label for label, *_ in told}) == 1


def test_pictures_are_gone_once_the_first_calls_are_made(tiny: Family) -> None:
    """Nothing keeps them: not the passes, and not the few samples on which the merged model runs beside."""
    gc.collect()
    gc.freeze()  # all else in memory takes long to look through
    passes = expert_passes(tiny, CONFIG)
    pictures = [ref(batch["pixel_values"].untyped_storage()) for one in passes.values() for batch in one.batches]
    alive: list[int] = []

    def look(_: str, done: int, __: int) -> None:
        gc.collect()
        alive.append(sum(one() is not None for one in pictures))

    try:
        ForwardOrder(tiny.run(look), passes, CONFIG, InMemoryBlocks()).calibrate()
    finally:
        gc.unfreeze()
    assert alive[-1] == 0
    assert alive[1] == 0


def test_statistics_of_the_first_block_do_not_hold_the_experts_steps(tiny: Family) -> None:
    first, kept = FirstBlock(), WalkCache(2**30)
    calibrate_family(tiny, CONFIG, experts=expert_passes(tiny, CONFIG, kept), first=first)
    held = ref(kept)
    del kept
    gc.collect()
    assert held() is None


@pytest.mark.slow
def test_room_is_given_back_whatever_lanes_share(tiny: Family) -> None:
    """Three lanes of one name leave first calls: what the last one holds is what is taken."""
    kept = WalkCache(2**30)
    passes = expert_passes(tiny, CONFIG, kept)
    calibrated_model = calibrate_family(tiny, CONFIG, experts=passes).weights
    for _ in range(2):
        measure_sources(tiny, calibrated_model, CONFIG, passes)
        taken = sum(_bytes(thing) for _, things, _ in kept._entries.values() for thing in things)
        assert kept.left == 2**30 - taken
