"""Replace a mixture of experts by one in which every expert is three linear maps that hooks can see.

transformers 5 keeps the weights of all experts of a layer in two three-dimensional parameters, which are not modules.
Files store the maps of every expert separately, and so does the module that replaces the library's here. In code an
expert of a mixture is called a *member*, to distinguish it from a task's expert, which is a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear

TOKENS, SHARES = "tokens", "shares"
"""Names of two identity modules of a mixture, whose inputs hooks can read: the states of all tokens `[tokens, width]`,
and the factors `[tokens, members]` of the members' outputs in a token's sum, 0 for members that the token does not
pass.
"""


# There are thousands of them, and files replace all that would be drawn.
class _Map(nn.Linear):
    """A linear map that is made without values, since its weights come from files."""

    def reset_parameters(self) -> None:
        """Leave the weights as they are."""


class MoEExpert(nn.Module):
    """One expert of a mixture: down(activation(gate(x)) * up(x)), without biases.

    Args:
        names: of the three maps in files: gate, up, down.
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
        """Return the names of the maps whose input is a token's state."""
        return self._gate, self._up

    @property
    def leaving(self) -> str:
        """Return the name of the map whose input is the product of the other two."""
        return self._down

    @property
    def widest(self) -> int:
        """Return the width of the widest input of its maps."""
        return max(int(self.get_parameter(f"{name}.weight").shape[1]) for name in (self._gate, self._down))

    def inner_features(self, given: Float[Tensor, "n d"], gate: Tensor, up: Tensor) -> Float[Tensor, "n inner"]:
        """Return the input of the last map, given the weights of the other two."""
        return self._apply_gate(linear(given, gate), linear(given, up))

    def forward(self, given: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        gate, up, down = (self.get_submodule(name) for name in (self._gate, self._up, self._down))
        made: Tensor = down(self._apply_gate(gate(given), up(given)))
        return made

    def _apply_gate(self, gate: Tensor, up: Tensor) -> Tensor:
        made: Tensor = self._activation(gate) * up
        return made


class Mixture(nn.Module):
    """All experts (members) of one layer; takes the arguments of the library's module and computes the same function.
    Every member is called in every forward, even without any token.

    Args:
        library: the library's module, with parameters `[members, 2 inner, width]` and `[members, width, inner]`.
        names: of every member's maps in files: gate, up, down.
        chosen: number of members that a router chooses for every token.
        router: name of the router inside the block; empty for one whose scores are not its weight times the state.
    """

    def __init__(self, library: Any, names: Sequence[str], chosen: int, router: str = "") -> None:
        super().__init__()
        count, width, inner = library.down_proj.shape
        for place in range(count):
            self.add_module(str(place), MoEExpert(names, width, inner, library.act_fn))
        self.add_module(TOKENS, nn.Identity())
        self.add_module(SHARES, nn.Identity())
        self.chosen, self.router = chosen, router

    @property
    def members(self) -> list[MoEExpert]:
        return [one for one in self.children() if isinstance(one, MoEExpert)]

    @property
    def token_share(self) -> float:
        """Return the share of all tokens that pass a member if the router sends equally many to each."""
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
        if given.is_meta:  # without data no router can say which member gets which token
            return total
        for place, member in enumerate(members):
            rows = routed_tokens(shares, place)
            made = member(given[rows]) * shares[rows, place, None]
            # `index_add` takes tensors of one dtype, and shares may be wider than states.
            total = total.index_add(0, rows, made.to(total.dtype))
        return total


def routed_tokens(shares: Float[Tensor, "tokens members"], place: int) -> Int[Tensor, " n"]:
    """Return the tokens that the router sends to a member, in order."""
    return shares[:, place].nonzero().squeeze(1)


def separate_members(model: nn.Module, experts: str, names: Sequence[str], chosen: int, router: str) -> None:
    """Replace the library's modules of experts by mixtures.

    Args:
        model: of the library, or a part of one.
        experts, router: endings of the names of these modules and of their routers, such as "mlp.experts".
        names, chosen: as for `Mixture`.
    """
    modules = dict(model.named_modules())
    for name in [name for name in modules if name.endswith(f".{experts}")]:
        where, _, own = name.rpartition(".")
        chooser = modules.get(f"{name.removesuffix(experts)}{router}", nn.Identity())
        # A bias, of scores or of the choice, would make them another function of the state.
        linear_alone = [own for own, _ in chooser.named_parameters()] == ["weight"]
        mixture = Mixture(modules[name], names, chosen, router if linear_alone else "")
        setattr(model.get_submodule(where), own, mixture)
