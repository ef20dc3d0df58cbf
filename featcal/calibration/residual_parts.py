"""Find the residual parts of a block (attention, then MLP) and their pieces.

One batch is run through the parts, to see which modules share an input, which one gets the residual stream, and whose
output is added to it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from featcal.models.adapter import Block, Call, Stage
from featcal.models.capture import capture_outputs, record_inputs
from featcal.models.compute import widen
from featcal.models.lane import run_block
from featcal.system.errors import InputError

_SAME = 0.02
"""Relative difference, beyond rounding, up to which the addition to the stream equals the output of a part's last map:
a scale or a norm between them differs by more."""


@dataclass(frozen=True)
class ResidualPart:
    """A residual part of a block, as observed on one batch."""

    name: str
    given: Mapping[str, Tensor]
    """The linear maps and norms in the order of their calls, with one token of their
    inputs; modules that share an input have the same tensor.
    """
    entering: str | None
    """The module whose input is the residual stream before the part; None if no module gets it unchanged."""
    writer: str | None
    """The linear map whose output is added to the stream; None if another operation is between, or if it is one of
    many."""
    mixed: Mapping[str, tuple[str, bool]] = field(default_factory=dict)
    """Mixture to which a map of a mixture of experts belongs, and True if other maps of the
    mixture compute the map's input.
    """

    @cached_property
    def pieces(self) -> list[tuple[str, ...]]:
        """Group the modules by shared input, in the order of their first call; in a mixture first the maps of all
        experts that get tokens, then the maps after them."""
        shared: dict[Hashable, list[str]] = {}
        for name, given in self.given.items():
            shared.setdefault(self.mixed.get(name, id(given)), []).append(name)
        return [tuple(names) for names in shared.values()]


def find_parts(stage: Stage, block: Block, placed: Mapping[str, Tensor], call: Call) -> list[ResidualPart]:
    """Run one batch through the residual parts of a block; return the observed parts.

    Args:
        placed: tensors of the block in the form of the forward pass, by name inside it.

    Raises:
        InputError: the parts together are not the block.
    """
    modules: dict[str, nn.Module] = {**block.maps, **block.routers, **block.layernorms}
    if stage.norm is not None:
        modules |= block.modules_of(stage.norm)
    found, before = [], call
    for name, run in stage.sublayers(block, placed).items():
        with record_inputs(modules) as given, capture_outputs(block.linears) as put_out:
            after = run(before)
        found.append(_part(name, block, given, put_out, (before.hidden_state, after.hidden_state)))
        before = after
    whole = run_block(stage, block, placed, call)
    missed = [name for name in modules if not any(name in part.given for part in found)]
    if missed or widen(before.hidden_state - whole.hidden_state).norm() > _rounding(whole.hidden_state):
        raise InputError(
            f"{block.name}: its residual parts are not the whole block{': ' if missed else ''}{', '.join(missed)}; "
            "this architecture can be calibrated with the recipe 'paper' alone"
        )
    return found


def _part(
    name: str, block: Block, given: Mapping[str, Tensor], put_out: Mapping[str, Tensor], stream: tuple[Tensor, Tensor]
) -> ResidualPart:
    """Describe a part by the inputs and outputs of its modules, and by the residual stream before and after it."""
    before, after = stream
    # By identity: a copy of the stream, or a normed one, is not the stream.
    entering = next((module for module, tensor in given.items() if tensor is before), None)
    last = next(reversed([module for module in given if module in put_out]), None)
    writer = last if last is not None and _adds(put_out[last], before, after) else None
    # A token of each: whole inputs would stay in memory, and tensors that were shared stay shared.
    tokens = {id(tensor): tensor[:1, :1] for tensor in given.values()}
    examples = {module: tokens[id(tensor)] for module, tensor in given.items()}
    return ResidualPart(name, examples, entering, writer, _mixture_maps(block))


def _mixture_maps(block: Block) -> dict[str, tuple[str, bool]]:
    """Return `Part.mixed` for the maps of a block's mixtures."""
    return {
        f"{name}.{place}.{own}": (name, own == member.leaving)
        for name, mixture in block.mixtures.items()
        for place, member in enumerate(mixture.members)
        for own in (*member.entering, member.leaving)
    }


def _adds(output: Tensor, before: Tensor, after: Tensor) -> bool:
    """Say whether a part adds a map's output to the stream unchanged."""
    if before.shape != after.shape:  # a merger of patches: what comes out is another stream
        return False
    gap = (widen(after) - widen(before) - widen(output)).norm()
    return bool(gap <= _SAME * widen(output).norm() + _rounding(after))


def _rounding(state: Tensor) -> Tensor:
    """Return a bound on the rounding error of sums in the dtype of a state."""
    size: Tensor = widen(state).norm()
    return 8 * torch.finfo(state.dtype).eps * size
