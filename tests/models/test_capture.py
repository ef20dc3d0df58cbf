"""Capture sees every linear map exactly once, or says that it did not."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from featcal.family.opening import Family
from featcal.models.adapter import Call, capture_call, check_buffers
from featcal.models.capture import capture_inputs, capture_outputs
from featcal.models.lane import ModelStream


class LinearOracle(TorchFunctionMode):
    """Every weight that `F.linear` is called with, whoever calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            self.weights.append(args[1])
        return func(*args, **(kwargs or {}))


def first(family: Family) -> Any:
    stage = family.adapter.stages[0]
    samples = family.expert_pass(family.samples("pets", "validation", 4, 0), 4)
    call = stage.first_call(family.merged.read(stage.outer), samples.batches[0], None)
    return stage, stage.blocks[0], call


def test_every_weight_matrix_of_a_block_is_seen_once(tiny: Family) -> None:
    _, block, call = first(tiny)
    tensors = block.local(tiny.merged.read(block.names))
    oracle = LinearOracle()
    with torch.no_grad(), oracle, capture_inputs({**block.linears, **block.layernorms}) as inputs:
        block.run(tensors, call)
    matrices = {tensor.data_ptr() for tensor in tensors.values() if tensor.ndim == 2}
    seen = [weight.data_ptr() for weight in oracle.weights]
    assert len(seen) == len(set(seen)) == 6
    assert set(seen) == matrices
    assert {name for name in inputs if name in block.linears} == set(block.linears)


def test_shared_inputs_are_the_same_object(tiny: Family) -> None:
    _, block, call = first(tiny)
    with torch.no_grad(), capture_inputs({**block.linears, **block.layernorms}) as inputs:
        block.run(block.local(tiny.merged.read(block.names)), call)
    assert inputs["self_attn.q_proj"] is inputs["self_attn.k_proj"] is inputs["self_attn.v_proj"]
    assert inputs["mlp.fc1"] is not inputs["mlp.fc2"]
    assert inputs["layer_norm1"] is call.hidden_state


def test_outputs_are_what_the_linear_maps_give(tiny: Family) -> None:
    _, block, call = first(tiny)
    tensors = block.local(tiny.merged.read(block.names))
    with (
        torch.no_grad(),
        capture_inputs({**block.linears, **block.layernorms}) as inputs,
        capture_outputs(block.linears) as outputs,
    ):
        block.run(tensors, call)
    for name in block.linears:
        expected = nn.functional.linear(inputs[name], tensors[f"{name}.weight"], tensors[f"{name}.bias"])
        torch.testing.assert_close(outputs[name], expected)


def test_hooks_are_gone_afterwards_also_after_an_error(tiny: Family) -> None:
    _, block, _ = first(tiny)
    with pytest.raises(KeyError), capture_inputs({**block.linears, **block.layernorms}), capture_outputs(block.linears):
        raise KeyError
    for module in block.module.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(2, 2)
        self.idle = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.map(self.map(x))
        return y


class Idle(Twice):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.map(x)
        return y


def test_a_linear_called_twice_is_an_error() -> None:
    block = Twice()
    with pytest.raises(RuntimeError, match="'map' is called twice"), capture_inputs(dict(block.named_children())):
        block(torch.ones(1, 2))


@pytest.mark.parametrize("whole", [False, True])
def test_the_first_batch_alone_runs_to_the_end_of_the_block(whole: bool) -> None:
    """So a second call is found on it, and all others are spared the last product."""
    ended: list[float] = []

    def inputs_of(module: Twice) -> list[float]:
        def run(_: object, call: Call) -> None:
            module(call.hidden_state)
            ended.append(float(call.hidden_state[0, 0]))

        block: Any = SimpleNamespace(run=run)
        lane: Any = SimpleNamespace(calls=[Call((torch.full((1, 2), float(place)),), {}) for place in range(3)])
        return [float(one["map"][0, 0]) for one in ModelStream.inputs(lane, block, {}, {"map": module.map}, whole)]

    assert inputs_of(Idle()) == [0, 1, 2]
    assert ended == ([0] if whole else [])
    with pytest.raises(RuntimeError, match="'map' is called twice") if whole else nullcontext():
        assert inputs_of(Twice()) == [0, 1, 2]


def test_a_linear_never_called_is_an_error() -> None:
    block = Idle()
    with pytest.raises(RuntimeError, match=r"never called.*idle"), capture_inputs(dict(block.named_children())):
        block(torch.ones(1, 2))


def test_a_missing_tensor_is_an_error_not_garbage(tiny: Family) -> None:
    _, block, call = first(tiny)
    tensors = block.local(tiny.merged.read(block.names))
    tensors.pop("mlp.fc1.weight")
    with pytest.raises(RuntimeError, match=r"mlp\.fc1\.weight"):
        block.run(tensors, call)


def test_only_the_private_stop_is_caught(tiny: Family) -> None:
    stage, block, _ = first(tiny)
    with pytest.raises(ValueError, match="image size"):
        capture_call(
            tiny.adapter.model,  # type: ignore[attr-defined]
            block.module,
            tiny.merged.read(stage.outer),
            pixel_values=torch.zeros(1, 3, 5, 5),
        )


def test_unset_buffers_are_refused() -> None:
    with torch.device("meta"):
        norm = nn.BatchNorm1d(2)
    with pytest.raises(RuntimeError, match="running_mean"):
        check_buffers(norm)
