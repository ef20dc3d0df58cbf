"""What would be silently wrong is refused with the name of the module: planted in tiny models of a future kind."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_text import CONFIGS
from torch import Tensor, nn

from featcal.calibration.block_statistics import BlockStatistics
from featcal.calibration.linear_group import LinearGroup
from featcal.calibration.norm_groups import check_norm
from featcal.calibration.token_rows import find_token_rows
from featcal.family.opening import Family
from featcal.models.adapter import Block, Call, Stage, capture_call
from featcal.models.capture import capture_inputs, capture_outputs
from featcal.models.families.registry import adapter_for
from featcal.models.features import final_features
from featcal.models.lane import BlockStep
from featcal.models.replay import check_replay
from featcal.suite.calibration_options import CalibrationConfig
from featcal.system.errors import InputError

WIDTH, HEADS = 8, 2
EXACT = CalibrationConfig(lam=0.1, rho=2.0, alpha=0.3, eps=0.0, rmsnorms=True)


class Rms(nn.Module):
    """weight * x / rms(x)."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def scale(self) -> Tensor:
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.scale() * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


class OnePlusRms(Rms):
    """Gemma's: (1 + weight) * x / rms(x)."""

    def scale(self) -> Tensor:
        return 1 + self.weight


class OnePlusLayerNorm(nn.LayerNorm):
    """A LayerNorm whose stored scale is one less than what it applies."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class Planted(nn.Module):
    """A block as architectures to come have them: k without a bias, queries normed head by head."""

    def __init__(self, norm: nn.Module, heads: bool = False) -> None:
        super().__init__()
        self.norm = norm
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.head_norm = Rms(WIDTH // HEADS) if heads else nn.Identity()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        query = self.head_norm(self.q(normed).unflatten(-1, (HEADS, -1))).flatten(-2)
        result: Tensor = hidden + self.out(torch.tanh(query) * self.k(normed))
        return result


class PlantedStage(Stage):
    """One planted block."""

    name = "planted"
    norm = Rms

    def __init__(self, module: nn.Module) -> None:
        self.blocks, self.outer = (Block("layers.3", module.double()),), ()

    def first_call(self, outer: Mapping[str, Tensor], inputs: Any, upstream: Call | None) -> Call:
        return Call((inputs["hidden"],), {})

    def weighting(self, index: int, module: str) -> str:
        return "all"

    def token_weights(self, *_: Any) -> None:
        return None


def calibrated(stage: Stage, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One block of one task whose expert, merged model and base are the same."""
    (block,) = stage.blocks
    batch = {"hidden": torch.randn(3, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))}
    call = stage.first_call({}, batch, None)
    moments = BlockStatistics(stage, 0, EXACT)
    with capture_inputs(moments.modules) as inputs, capture_outputs(block.linears) as outputs:
        following = stage.advance(call, block.run(tensors, call))
    moments.see(inputs)
    rows = find_token_rows(stage, [call], [batch], EXACT)
    moments.update(rows, 0, inputs, BlockStep(call, following, inputs, outputs), tensors)
    moments.end_task(tensors)
    return {n: t for group in moments.groups for n, t in group.solve(tensors, tensors, EXACT).items()}


def parameters(module: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {n: torch.randn(p.shape, generator=generator, dtype=torch.float64) for n, p in module.named_parameters()}


def test_maps_with_and_without_bias_on_one_input_are_solved_apart() -> None:
    """Identical models stay as they are; in one group the biases would remain in the targets."""
    stage = PlantedStage(Planted(Rms()))
    tensors = parameters(stage.blocks[0].module)
    solved = calibrated(stage, tensors)
    assert solved.keys() == tensors.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(solved[name], tensor, rtol=1e-9, atol=1e-9)


def test_one_group_of_maps_with_and_without_bias_is_refused() -> None:
    modules = {"attn.q": nn.Linear(4, 4), "attn.k": nn.Linear(4, 4, bias=False)}
    with pytest.raises(InputError, match=r"attn\.q, attn\.k: maps with and without bias"):
        LinearGroup(["attn.q", "attn.k"], "all", modules)


@pytest.mark.parametrize(
    ("norm", "option"), [(OnePlusRms(), "--no-rmsnorms"), (OnePlusLayerNorm(WIDTH), "--no-layernorms")]
)
def test_norms_of_another_scale_are_refused_by_name(norm: nn.Module, option: str) -> None:
    stage = PlantedStage(Planted(norm))
    with pytest.raises(InputError, match=rf"layers\.3\.norm: OnePlus\w+ is not weight.*{option}"):
        calibrated(stage, parameters(stage.blocks[0].module))


def test_an_activation_stated_beside_its_kind_is_a_setting() -> None:
    gelu, relu = (
        adapter_for(CONFIGS["t5"] | {"dense_act_fn": own}, [], torch.device("cpu"), "m").settings
        for own in ("gelu_new", "relu")
    )
    assert {name for name in gelu if gelu[name] != relu[name]} == {"dense_act_fn"}


def test_norms_with_other_parameters_are_refused() -> None:
    for norm in (nn.LayerNorm(WIDTH, elementwise_affine=False), nn.RMSNorm(WIDTH, elementwise_affine=False)):
        with pytest.raises(InputError, match=r"layers\.0\.norm: \w+Norm is not weight"):
            check_norm("layers.0.norm", norm)


def test_norms_over_heads_are_refused_by_name() -> None:
    stage = PlantedStage(Planted(Rms(), heads=True))
    with pytest.raises(InputError, match=r"layers\.3\.head_norm: its input has shape \[3, 5, 2, 4\]"):
        calibrated(stage, parameters(stage.blocks[0].module))


class Masked(nn.Module):
    """A block that is called with a mask and a layer's own scale."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, mask: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        return hidden + scale * self.map(hidden) * mask, mask


class Windowed(nn.Module):
    """A library model of four blocks; `own` says what its third block is called with that the others are not."""

    def __init__(self, own: str) -> None:
        super().__init__()
        self.layers, self.own = nn.ModuleList(Masked() for _ in range(4)), own

    def forward(self, hidden: Tensor) -> Tensor:
        every, window = torch.ones(1, 7, 1), torch.ones(1, 7, 1)  # a long window masks nothing of a short text
        for index, layer in enumerate(self.layers):
            third = index == 2
            mask = window if third and self.own == "mask" else every
            kwargs = {"scale": 2.0} if third and self.own == "value" else {}
            if third and self.own == "name":
                kwargs = {"scale": 1.0}
            hidden, _ = layer(hidden, mask=mask, **kwargs)
        return hidden


class WindowedStage(PlantedStage):
    def __init__(self, own: str) -> None:
        with torch.device("meta"):
            self._model = Windowed(own)
        self.blocks = tuple(Block(f"model.layers.{i}", layer) for i, layer in enumerate(self._model.layers))
        self.outer = ()

    def first_call(self, outer: Mapping[str, Tensor], inputs: Any, upstream: Call | None) -> Call:
        return capture_call(self._model, self.blocks[0].module, outer, **inputs)


def windowed(own: str) -> Any:
    stage = WindowedStage(own)
    return SimpleNamespace(
        stages=(stage,),
        library="transformers",
        shapes=dict,
        probe=lambda: {"hidden": torch.randn(2, 7, WIDTH)},
        name_of=lambda block: f"block {block.name.rpartition('.')[2]}",
    )


@pytest.mark.parametrize("own", ["mask", "value", "name"])
def test_blocks_that_are_called_with_arguments_of_their_own_are_refused_by_name(own: str) -> None:
    with pytest.raises(InputError, match=r"block 2: transformers calls this block with other arguments"):
        check_replay(windowed(own), torch.device("cpu"))


def test_blocks_that_are_called_alike_are_taken_and_left_as_they_were() -> None:
    adapter = windowed("nothing")
    check_replay(adapter, torch.device("cpu"))
    assert not any("forward" in vars(block.module) for block in adapter.stages[0].blocks)


def test_a_stage_that_carries_too_little_is_refused(tiny: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check is of `advance` as well: here it forgets everything but the state."""
    stage = type(tiny.adapter.stages[0])
    check_replay(tiny.adapter, torch.device("cpu"))
    monkeypatch.setattr(stage, "advance", lambda _, call, output: Call((output,), {}))
    with pytest.raises(InputError, match=r"block 1: transformers calls"):
        check_replay(tiny.adapter, torch.device("cpu"))


def test_an_operation_that_the_device_has_not_is_one_sentence(tiny: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "The operator 'aten::some' is not currently implemented for the MPS device. If you want it to be, say so."

    def refuse(*_: object) -> None:
        raise NotImplementedError(f"{reason}\nAs a temporary fix, set an environment variable.")

    monkeypatch.setattr(Block, "run", refuse)
    one = tiny.expert_pass(tiny.samples("pets", "test", 2, 0), 2)
    with pytest.raises(InputError) as refused:
        final_features(tiny.adapter, tiny.merged, {}, one.batches, tiny.compute)
    first = tiny.adapter.blocks()[0].name
    assert str(refused.value) == f"{first} cannot be computed on cpu ({reason}); use --device cpu"
