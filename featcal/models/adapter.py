"""What featcal must know about an architecture: where its blocks are and how a forward pass walks them.

A model is a *skeleton* (the library's own modules, parameters on the meta device) and a dict of tensors. An
adapter never rewrites a forward: block i runs as the library's own module on the tensors of whichever model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from featcal.errors import InputError


@dataclass(frozen=True)
class Call:
    """How one block is called on one batch; `args[0]` is the token state `[batch, tokens, width]`."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def hidden(self) -> Tensor:
        hidden: Tensor = self.args[0]
        return hidden


@dataclass(frozen=True)
class Block:
    """One block: `name` is the prefix of its tensors, `module` its skeleton."""

    name: str
    module: nn.Module
    names: tuple[str, ...] = field(init=False)
    """Canonical names of the block's tensors."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(f"{self.name}.{n}" for n, _ in self.module.named_parameters()))

    def local(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`{canonical name: tensor}` → `{name inside the block: tensor}`."""
        return {name[len(self.name) + 1 :]: tensors[name] for name in self.names}

    def canonical(self, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `local`."""
        return {f"{self.name}.{name}": tensor for name, tensor in local.items()}

    def run(self, local: Mapping[str, Tensor], call: Call) -> Any:
        """The block's own forward with the given tensors (names inside the block, complete: strict)."""
        return functional_call(self.module, dict(local), call.args, dict(call.kwargs), strict=True)


class Stage(ABC):
    """Blocks that follow each other in forward order, fed by one first call.

    CLIP has one stage, an encoder-decoder two: the decoder's first call is taken after the encoder is done.
    """

    name: str
    blocks: tuple[Block, ...]
    outer: tuple[str, ...]
    """Tensors outside the blocks that the first call needs (embeddings, first norm)."""

    @abstractmethod
    def first_call(self, outer: Mapping[str, Tensor], inputs: Mapping[str, Tensor], upstream: Call | None) -> Call:
        """The call of block 0 on `inputs`; `upstream` is the call after the last block of the stage before."""

    @abstractmethod
    def weighting(self, index: int, module: str) -> str:
        """Name of the token weighting of `module` in block `index`; "all" is weight 1 on every token."""

    @abstractmethod
    def token_weights(self, weighting: str, call: Call, patch_weight: float) -> Tensor | None:
        """Weights `[batch, tokens]` of a weighting on one batch; None means all 1."""

    def sublayers(
        self, block: Block, tensors: Mapping[str, Tensor], call: Call
    ) -> Mapping[str, Callable[[Tensor], Tensor]]:
        """The residual halves of a block, from state to state, in order; together they are the block.

        For measurement only; empty where an architecture's block does not fall apart like this.
        """
        return {}

    def advance(self, call: Call, output: Any) -> Call:
        """The call of the next block, given what this block returned."""
        hidden = output[0] if isinstance(output, tuple) else output
        return Call((hidden, *call.args[1:]), call.kwargs)


class Adapter(ABC):
    """One architecture family at one size."""

    family: str
    stages: tuple[Stage, ...]
    tower: tuple[str, ...]
    """Canonical names that base, merged and every expert must have: all that a merger acts on."""
    head: tuple[str, ...]
    """Canonical names read from the base for every model (CLIP: the visual projection), possibly none."""
    closing: tuple[str, ...]
    """Names of the tower that `final` needs."""

    input_shape: tuple[int, ...]
    """Shape of one sample's model input."""
    settings: Mapping[str, Any]
    """Options that change the forward without changing a shape; all models of a suite must agree on them."""

    @abstractmethod
    def final(self, tensors: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
        """Final features `[batch, k]` of the last token state; needs the tensors in `closing` and `head`."""

    @abstractmethod
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor in `tower` and `head`."""

    @staticmethod
    @abstractmethod
    def canonical(stored: str) -> str | None:
        """Canonical name of a tensor in a checkpoint file; None for one that carries no information."""

    @staticmethod
    @abstractmethod
    def carried(name: str) -> bool:
        """Whether a tensor outside `tower` and `head` is a known part of the checkpoint (such as a text tower)."""

    def blocks(self) -> list[Block]:
        """Every block of every stage in forward order."""
        return [block for stage in self.stages for block in stage.blocks]

    def block_layers(self) -> list[str]:
        """Names of all blocks as charts and tables show them, in forward order."""
        several = len(self.stages) > 1
        return [
            f"{stage.name} block {i}" if several else f"block {i}"
            for stage in self.stages
            for i in range(len(stage.blocks))
        ]


class _StopForward(Exception):
    """Raised by the hook on block 0; nothing else may be caught."""


def capture_call(model: nn.Module, first_block: nn.Module, tensors: Mapping[str, Tensor], **inputs: Any) -> Call:
    """How `model`'s own forward calls `first_block`, without running it.

    Args:
        model: skeleton; parameters that `tensors` leaves out stay on meta and must not be reached.
        tensors: parameters before `first_block`, by name in `model`.
    """
    seen: list[Call] = []

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(Call(args, kwargs))
        raise _StopForward

    parameters = {**dict(model.named_parameters()), **dict(model.named_buffers()), **tensors}
    handle = first_block.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        functional_call(model, parameters, (), inputs, strict=True)
    except _StopForward:
        pass
    finally:
        handle.remove()
    return seen[0]


def check_buffers(skeleton: nn.Module) -> nn.Module:
    """`skeleton` in eval mode; RuntimeError if a buffer was left on the meta device (its values would be garbage)."""
    unset = [name for name, buffer in skeleton.named_buffers() if buffer.is_meta]
    if unset:
        raise RuntimeError(f"buffers without values in the skeleton: {', '.join(unset)}")
    return skeleton.eval()


def adapter_for(config: Mapping[str, Any], device: torch.device, label: str) -> Adapter:
    """The adapter for a checkpoint's `config.json`.

    Raises:
        InputError: an architecture that featcal does not know.
    """
    from huggingface_hub.errors import StrictDataclassError

    from featcal.models.clip import ClipVision

    kind = config.get("model_type")
    if kind in ("clip", "clip_vision_model"):
        try:
            return ClipVision(config, device)
        except (TypeError, ValueError, ZeroDivisionError, StrictDataclassError) as error:
            what = " ".join(str(error).split())
            raise InputError(f"{label}: config.json does not describe a CLIP model: {what}") from error
    raise InputError(f"{label}: architecture '{kind}' is not supported; featcal reads clip and clip_vision_model")
