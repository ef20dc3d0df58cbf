"""Run the residual parts of a block, such as attention and MLP, one after the other, by the
names in its row of facts.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from featcal.models.adapter import Block, Call, Stage, Sublayer
from featcal.models.families.decoder_facts import DecoderPart
from featcal.system.errors import InputError


class PartedStage(Stage):
    """A stage whose blocks have the residual parts that its row of facts names."""

    parts: tuple[DecoderPart, ...]
    """Parts of every block, in the order in which they run."""
    shared: tuple[tuple[str, ...], ...]
    """Linear maps that share an input, by name inside a block; a block may lack some."""

    def part(self, module: str) -> str:
        own = ((part, name) for part in self.parts for name in (part.module, part.joined) if name)
        return next((part.name for part, name in own if module.startswith(f"{name}.")), "block")

    def sharing(self, index: int) -> list[tuple[str, ...]]:
        linears = self.blocks[index].linears
        found = [names for names in self.shared if set(names) <= linears.keys()]
        together = {name for names in found for name in names}
        return [*found, *((name,) for name in linears if name not in together)]

    def sublayers(self, block: Block, tensors: Mapping[str, Tensor]) -> Mapping[str, Sublayer]:
        if not self.parts:
            raise InputError(f"{block.name}: no row of facts names attention and MLP inside it; leave sublayers out")
        return {part.name: partial(_run_part, block, tensors, part) for part in self.parts}


def _run_part(block: Block, tensors: Mapping[str, Tensor], part: DecoderPart, call: Call) -> Call:
    run = partial(block.run_part, tensors)
    given = run(part.norm, call.hidden_state) if part.norm else call.hidden_state
    known = _bind_arguments(block.module, call.block_call(block.name))
    output = run(part.module, given, **_select_arguments(block.module.get_submodule(part.module), known))
    added = output[0] if isinstance(output, tuple) else output
    if part.joined:
        return call.with_state(run(part.joined, added, call.hidden_state))
    return call.with_state(call.hidden_state + (run(part.post_norm, added) if part.post_norm else added))


def _bind_arguments(module: nn.Module, call: Call) -> dict[str, Any]:
    """Return the arguments of a block beside its state, by the names in its own forward."""
    bound = inspect.signature(module.forward).bind(*call.args, **call.kwargs)
    found = dict(bound.arguments)
    rest = [p.name for p in bound.signature.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
    found |= {name: value for one in rest for name, value in found.pop(one, {}).items()}
    # The state itself: a part gets it from its norm.
    found.pop(next(iter(bound.signature.parameters)))
    return found


def _select_arguments(module: nn.Module, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a module of the block takes."""
    parameters = inspect.signature(module.forward).parameters.values()
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
        return dict(given)
    return {one.name: given[one.name] for one in parameters if one.name in given}
