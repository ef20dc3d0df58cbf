"""A mixture of experts whose every expert is three linear maps that hooks can see.

transformers 5 keeps the weights of all experts of a layer in two three-dimensional parameters, which are no modules.
Files have every expert's maps apart, and so has the stand-in that takes the place of the library's module here. What
one expert of a mixture is called in code is a *member*, since a task's expert is a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear

TOKENS, SHARES = "tokens", "shares"
"""Modules of a mixture that compute nothing: what they are given are the states of all tokens `[tokens, width]`, and
with which factor the output of every member enters a token's sum `[tokens, members]`, 0 where none does."""


class _Map(nn.Linear):
    """A linear map whose weights come from files; there are thousands of them."""

    def reset_parameters(self) -> None:
        """Nothing is drawn."""


class Member(nn.Module):
    """One expert of a mixture: down(activation(gate(x)) * up(x)), without biases.

    Args:
        names: of the three maps, as files have them: gate, up, down.
        width, inner: of a token's state, and between the maps.
    """

    def __init__(self, names: Sequence[str], width: int, inner: int, activation: nn.Module) -> None:
        super().__init__()
        self._gate, self._up, self._down = names
        for name, (inputs, outputs) in zip(names, ((width, inner), (width, inner), (inner, width)), strict=True):
            self.add_module(name, _Map(inputs, outputs, bias=False))
        self._activation = activation

    @property
    def entering(self) -> tuple[str, str]:
        """The maps that are given a token's state."""
        return self._gate, self._up

    @property
    def leaving(self) -> str:
        """The map that is given what they make."""
        return self._down

    @property
    def widest(self) -> int:
        """Features of the widest input of its maps."""
        return max(int(self.get_parameter(f"{name}.weight").shape[1]) for name in (self._gate, self._down))

    def inner_features(self, given: Float[Tensor, "n d"], gate: Tensor, up: Tensor) -> Float[Tensor, "n inner"]:
        """What the last map is given, with the weights of the other two."""
        return self._apply_gate(linear(given, gate), linear(given, up))

    def forward(self, given: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        gate, up, down = (self.get_submodule(name) for name in (self._gate, self._up, self._down))
        made: Tensor = down(self._apply_gate(gate(given), up(given)))
        return made

    def _apply_gate(self, gate: Tensor, up: Tensor) -> Tensor:
        made: Tensor = self._activation(gate) * up
        return made


class Mixture(nn.Module):
    """All members of one layer: called as the library's module is, and the same function.

    Every member is called in every forward, also with no token at all.

    Args:
        library: the library's module, whose parameters have the shapes `[members, 2 inner, width]` and
            `[members, width, inner]`.
        names: of every member's maps in files: gate, up, down.
        chosen: members that a router chooses for every token.
    """

    def __init__(self, library: Any, names: Sequence[str], chosen: int) -> None:
        super().__init__()
        count, width, inner = library.down_proj.shape
        for place in range(count):
            self.add_module(str(place), Member(names, width, inner, library.act_fn))
        self.add_module(TOKENS, nn.Identity())
        self.add_module(SHARES, nn.Identity())
        self.chosen = chosen

    @property
    def members(self) -> list[Member]:
        return [one for one in self.children() if isinstance(one, Member)]

    @property
    def token_share(self) -> float:
        """Share of all tokens that pass a member where the router treats all alike."""
        return self.chosen / len(self.members)

    def forward(
        self,
        hidden_states: Float[Tensor, "tokens d"],
        top_k_index: Int[Tensor, "tokens k"],
        top_k_weights: Float[Tensor, "tokens k"],
    ) -> Float[Tensor, "tokens d"]:
        members = self.members
        none = top_k_weights.new_zeros(len(hidden_states), len(members))
        shares = self.get_submodule(SHARES)(none.scatter(1, top_k_index, top_k_weights))
        given = self.get_submodule(TOKENS)(hidden_states)
        total = torch.zeros_like(given)
        if given.is_meta:  # there are no data to say which member gets which token
            return total
        for place, member in enumerate(members):
            rows = routed_tokens(shares, place)
            made = member(given[rows]) * shares[rows, place, None]
            total = total.index_add(0, rows, made.to(total.dtype))
        return total


def routed_tokens(shares: Float[Tensor, "tokens members"], place: int) -> Int[Tensor, " n"]:
    """The tokens that the router sends to a member, in order."""
    return shares[:, place].nonzero().squeeze(1)


def separate_members(model: nn.Module, experts: str, names: Sequence[str], chosen: int) -> None:
    """Replace the library's modules of experts by mixtures.

    Args:
        model: of the library, or a part of one.
        experts: how the names of these modules end, such as "mlp.experts".
        names, chosen: as `Mixture` has them.
    """
    found = [name for name, _ in model.named_modules() if name.endswith(f".{experts}")]
    for name in found:
        where, _, own = name.rpartition(".")
        library = model.get_submodule(name)
        setattr(model.get_submodule(where), own, Mixture(library, names, chosen))
