"""Drift written a second time, for models of transformers: the library's own forward, watched and altered by hooks.

Nothing of featcal is used. A *tap* is a place in the forward where a state can be read and put; a layer of the ledger
is what lies between the taps of two states. The model's layer on the expert's state is the model's own forward with
the expert's state put in at the taps before that layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from featcal.testing.reference import Sample

Tap = tuple[str, str]
"""Name of a module, and "in" or "out"."""
State = tuple[Tap, ...]
"""Where all that later layers see of a sample can be read."""


@torch.no_grad()
def run(
    model: Any, sample: Sample, states: Mapping[str, State], put: Mapping[Tap, Tensor] | None = None
) -> dict[str, tuple[Tensor, ...]]:
    """The tensors at the taps of every state, by state; those in `put` replace what the forward had there."""
    put, handles = put or {}, []
    seen: dict[Tap, Tensor] = {}
    for name in {name for taps in states.values() for name, _ in taps}:

        def before(_: Any, args: Any, name: str = name) -> Any:
            seen[name, "in"] = put.get((name, "in"), args[0])
            return (seen[name, "in"], *args[1:])

        def after(_: Any, args: Any, output: Any, name: str = name) -> Any:
            first, *rest = output if isinstance(output, tuple) else (output,)
            seen[name, "out"] = put.get((name, "out"), first)
            return (seen[name, "out"], *rest) if isinstance(output, tuple) else seen[name, "out"]

        module = model.get_submodule(name)
        handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    model(**sample)
    for handle in handles:
        handle.remove()
    return {state: tuple(seen[tap] for tap in taps) for state, taps in states.items()}


def drift(model: Any, expert: Any, sample: Sample, states: Mapping[str, State], last: int) -> dict[str, dict[str, Any]]:
    """The numbers of Props. 1, 2' and 4 for every layer on one sample.

    Args:
        states: by the name of the layer that they are the state after; the last one is the normed state of the
            decoder, of which the position `last` is the final feature.
    """
    *_, head = states

    def vector(found: Mapping[str, tuple[Tensor, ...]], layer: str) -> Tensor:
        return found[head][0][0, last] if layer == head else torch.cat([part.flatten() for part in found[layer]])

    of_model, of_expert = run(model, sample, states), run(expert, sample, states)
    final = vector(of_model, head) - vector(of_expert, head)
    found: dict[str, dict[str, Any]] = {}
    before, onward = torch.empty(0), of_model
    for layer, taps in states.items():
        h_model, h_expert, on_expert = (vector(one, layer) for one in (of_model, of_expert, onward))
        e, m, p = h_model - h_expert, on_expert - h_expert, h_model - on_expert
        numbers = {"drift": e.norm(), "expert_norm": h_expert.norm(), "mismatch": m.norm(), "propagation": p.norm()}
        numbers["alignment"] = cosine(m, p)
        if len(before) == len(e):  # a skip connection leads past the layer
            numbers["response"] = cosine(p - before, before)
        arrived = vector(onward, head)
        onward = run(model, sample, states, dict(zip(taps, of_expert[layer], strict=True)))
        numbers["telescoped"] = (arrived - vector(onward, head)) @ final
        found[layer], before = {name: float(number) for name, number in numbers.items()}, e
    return found


def cosine(left: Tensor, right: Tensor) -> Tensor:
    """0 where one of them vanishes."""
    scale = left.norm() * right.norm()
    return left @ right / scale if scale > 0 else scale
