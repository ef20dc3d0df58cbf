"""Collect statistics of one expert's linear maps in a mixture, on the tokens that the student's router sends to it, and
of the router itself, which every token passes.

In code an expert of a mixture is a member (`models.families.mixture`); the expert is the task's model. The student's
router decides which tokens a member gets, and with which weight. A member's output for a token is multiplied by the
router's share g before it is added to the stream, so its squared error counts g^2 times there. The target is that of
every map (Eqs. 10 and 13): the expert's own map on the expert's own input at the same token, even if the expert's
router sends the token elsewhere. The weight of a task for a member is the share of the task's weights that the member
gets, so that one token of a task does not count as much as thousands of another; docs/theory/recipes.md has the
formulas.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from featcal.calibration.column_rounding import Rounder
from featcal.calibration.linear_group import LinearGroup
from featcal.calibration.linear_statistics import CurrentTask
from featcal.calibration.precision import product_dtype
from featcal.calibration.token_rows import Named, TokenRows
from featcal.models.adapter import Stage
from featcal.models.compute import cast, find_device, widen
from featcal.models.families.mixture import SHARES, TOKENS, Mixture, MoEExpert, routed_tokens
from featcal.models.lane import BlockStep
from featcal.suite.calibration_options import CalibrationConfig


@dataclass(frozen=True)
class ExpertSlot:
    """Identity of an expert of a mixture ("member" in code): its mixture, and its number in it."""

    name: str
    """Name of its mixture, inside the block."""
    mixture: Mixture
    place: int
    """Number of the expert in its mixture."""

    @property
    def member(self) -> MoEExpert:
        return self.mixture.members[self.place]

    def maps(self, names: Collection[str]) -> list[str]:
        """Return names inside the block for maps of this member."""
        return [f"{self.name}.{self.place}.{name}" for name in names]


class RoutedGroup(LinearGroup):
    """Maps of one member with a shared input. They are solved if the member gets at least as many tokens, over all
    tasks, as the widest input of its maps has features, or if there is a prior.
    """

    def __init__(self, names: Collection[str], weighting: str, seat: ExpertSlot) -> None:
        inside = {name: seat.mixture.get_submodule(name[len(seat.name) + 1 :]) for name in seat.maps(names)}
        super().__init__([*inside], weighting, inside)
        self._seat = seat
        self.floor = seat.member.widest
        """Number of tokens over all tasks below which the member is not solved."""

    def expected_tokens(self, tokens: int) -> int:
        return int(tokens * self._seat.mixture.token_share)

    def route(self, tokens: int) -> str:
        """Choose the route with the smaller matrix."""
        # Matrices of all members are in memory together, so size counts before multiplications.
        return "inputs" if self.inputs <= self.outputs else "mixed"

    def expert_modules(self, tokens: int) -> tuple[list[str], list[str]]:
        """Return the module whose inputs are the expert's states of all tokens; the student's router selects among
        them."""
        return [f"{self._seat.name}.{TOKENS}"], []

    def expert_inputs(self, inputs: Named, theirs: Named, tokens: TokenRows, expert: Named) -> tuple[Tensor, TokenRows]:
        """Return the expert's inputs of these maps at the tokens that the student's router sends here, and their
        rows."""
        _, places, own, _ = self._choose_tokens(inputs[f"{self._seat.name}.{SHARES}"], tokens)
        return self._expert_features(theirs[f"{self._seat.name}.{TOKENS}"][places], expert), own

    def update(
        self,
        inputs: Named,
        trace: BlockStep,
        expert: Named,
        tokens: TokenRows,
        count: int,
        config: CalibrationConfig,
        weighed: TokenRows | None = None,
    ) -> None:
        """Add one batch of the current task; `count` is the task's number of tokens in all members together."""
        kept, places, own, mass = self._choose_tokens(inputs[f"{self._seat.name}.{SHARES}"], tokens)
        x = inputs[self.names[0]][kept]
        states = trace.inputs[f"{self._seat.name}.{TOKENS}"]
        if self._task is None:
            self._products = product_dtype(x.dtype, config)
        dtype, route = self._products, self.route(count)
        x, x_expert = cast(x, dtype), cast(self._expert_features(states[places], expert), dtype)
        r = torch.lerp(x, x_expert, config.alpha)
        if route == "mixed":
            r = r @ self.stack(expert, "weight", dtype).mT
        self._count(x, r, weighed or own, route, count)
        self.current.mass += mass

    def _choose_tokens(
        self, shares: Float[Tensor, "tokens members"], tokens: TokenRows
    ) -> tuple[Bool[Tensor, " m"], Int[Tensor, " n"], TokenRows, float]:
        """Select the tokens with non-zero weight (n) among those that the router sends to the member (m); return the
        selection, their positions among all tokens of the batch, their rows, and the sum of all weights in all
        members.
        """
        shares = shares.to(find_device(shares.device, torch.float64))  # where the weights are
        place, weights = self._seat.place, tokens.spread(len(shares)).to(shares.device)
        counted = weights > 0  # what is padded may hold anything
        mass = float(weights[counted] @ widen(shares[counted]).square().sum(1))
        places = routed_tokens(shares, place)
        kept = counted[places]
        places = places[kept]
        # An error of the member enters the stream g times, so its square counts g^2.
        own = weights[places] * widen(shares[places, place]).square()
        return kept, places, TokenRows(len(places), float(own.sum()), None, own), mass

    def _expert_features(self, states: Float[Tensor, "n width"], expert: Named) -> Float[Tensor, "n d"]:
        """Compute the inputs of the expert's maps at these states of the expert."""
        member = self._seat.member
        if not self.names[0].endswith(f".{member.leaving}"):
            return states
        gate, up = (expert[f"{name}.weight"].to(states.dtype) for name in self._seat.maps(member.entering))
        return member.inner_features(states, gate, up)

    def _require_whole(self, current: CurrentTask) -> None:
        """Accept any number of tokens, because the router decides how many come here."""

    @property
    def is_starved(self) -> bool:
        # With fewer tokens G is singular: where no token points, the solution is the anchor, not W_mer.
        # A prior knows more of such directions than the anchor does.
        return self.sums.tokens < self.floor and not self.sums.priors

    def solve(
        self, merged: Named, base: Named, config: CalibrationConfig, rounder: Rounder | None = None
    ) -> dict[str, Tensor]:
        """Solve the maps; return nothing for a member with too few tokens."""
        if self.is_starved:
            self.let_go()
            return {}
        return super().solve(merged, base, config, rounder)


class RouterScores(LinearGroup):
    """The router of a mixture as a linear map, from a token's state to the scores of the experts."""

    def route(self, tokens: int) -> str:
        """Choose the route "inputs": the library's module returns more than the scores."""
        return "inputs"


def router_groups(stage: Stage, index: int, maps: Collection[str]) -> list[RouterScores]:
    """Return the groups of the routers of a block that are among `maps`, by name inside the block."""
    routers = stage.blocks[index].routers
    return [RouterScores([name], stage.weighting(index, name), routers) for name in routers if name in maps]


def routed_groups(stage: Stage, index: int, maps: Collection[str]) -> list[RoutedGroup]:
    """Return the groups of the members of a block whose maps are among `maps`, by name inside the block."""
    seats = (
        ExpertSlot(name, mixture, place)
        for name, mixture in stage.blocks[index].mixtures.items()
        for place in range(len(mixture.members))
    )
    groups = (
        RoutedGroup(names, stage.weighting(index, seat.name), seat)
        for seat in seats
        for names in (seat.member.entering, (seat.member.leaving,))
    )
    return [group for group in groups if set(group.names) <= {*maps}]


def routing(stage: Stage, index: int, maps: Collection[str]) -> dict[str, torch.nn.Module]:
    """Return the modules of a block whose inputs contain the router's shares for some `maps`, by name inside the
    block."""
    mixtures = stage.blocks[index].mixtures
    return {
        f"{name}.{SHARES}": mixture.get_submodule(SHARES)
        for name, mixture in mixtures.items()
        if any(one.startswith(f"{name}.") for one in maps)
    }


def note_starved(layers: Mapping[str, str], starved: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a note on experts of mixtures that keep the merged weights (`Account.starved`); none if all were solved.

    Args:
        layers: names of blocks in tables, by name of the block.
    """
    if not starved:
        return []
    which = (f"{layers[name]}: {', '.join(own.rpartition('.')[2] for own in found)}" for name, found in starved.items())
    count = sum(map(len, starved.values()))
    text = "1 expert of a mixture keeps" if count == 1 else f"{count} experts of mixtures keep"
    return [
        f"{text} the merged weights, since fewer tokens of the calibration samples came there than the widest input of "
        f"an expert's maps has features ({'; '.join(which)}); more samples may change that"
    ]
