"""The options of a calibration run."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, TypedDict

from featcal.models.adapter import Adapter, Block, Stage
from featcal.models.compute import PRECISIONS
from featcal.models.linear_maps import LinearMap
from featcal.suite.name_grammar import ALL
from featcal.system.errors import InputError
from featcal.system.formatting import did_you_mean

PAPER, REFINED, INFORMED = RECIPES = ("paper", "refined", "informed")
"""How a block is calibrated: from one snapshot, as published, or piece by piece, which is featcal's own; the last one
with what the experts' weights know as a prior."""
NUMBERS: Mapping[str, tuple[str, ...]] = {
    PAPER: ("lam", "rho", "alpha"),
    REFINED: ("lam", "rho", "alpha", "beta"),
    INFORMED: ("lam", "rho", "alpha", "beta", "mu"),
}
"""Options that each recipe has good values of its own for; of those that are not its own it has 0."""
OF_A_RECIPE = NUMBERS[INFORMED]
"""Options whose good values differ from recipe to recipe."""
OWN = (*OF_A_RECIPE, "weigh_tokens")
"""Options that a suite recommends for one recipe; they say nothing of another."""
CAUTIOUS: Mapping[str, float] = {"alpha": 0.3, "beta": 0.0}
"""What featcal's own recipes take where the calibration samples are in fog, or drifted from what the model will see."""
_BY_RECIPE: Any = None
"""Default of an option that the recipe decides (`recipe_numbers`)."""
PARTIAL = ("blocks", "maps", "tasks")
"""Options that choose a part of what is calibrated, or of what it is calibrated on."""
IDLE = ("batch_size",)
"""Options that change nothing but time and memory."""


@dataclass(frozen=True)
class CalibrationConfig:
    """Options of Algorithm 1, with the paper's CLIP values as defaults (`config_for` gives those of a suite).

    Raises:
        InputError: a value outside its range; the message names the option.
    """

    lam: float = _BY_RECIPE
    """Ridge strength, >= 0: pull towards the anchor (Eq. 12). 0 needs features of full rank."""
    rho: float = _BY_RECIPE
    """Anchor = rho * merged + (1 - rho) * base (Eq. 11); above 1 it extrapolates beyond the merged model."""
    alpha: float = _BY_RECIPE
    """Share of the expert's own input features in the targets, in [0, 1] (Eq. 10)."""
    samples: int = 256
    """Calibration samples per task, > 0; a task that has fewer gives all it has."""
    seed: int = 42
    """Together with the task's name it decides which samples are drawn."""
    biases: bool = True
    """Calibrate the biases of linear maps (Eq. 55)."""
    layernorms: bool = True
    """Calibrate LayerNorm scales and shifts (Eq. 59)."""
    rmsnorms: bool = False
    """Calibrate the scales of RMSNorms (T5, most decoders); our extension of Eq. (59), which the paper does not run."""
    completion_only: bool = False
    """In causal language models count the positions that predict the answer alone, not the rest of the prompt."""
    patch_weight: float = 0.01
    """Weight of CLIP's patch tokens in the last block, in (0, 1]; the class token has 1, inputs of keys and
    values always 1. The paper's own code uses 0.01."""
    image_weight: float = 1.0
    """In language models that read pictures, weight of a picture's tokens, in (0, 1]; tokens of the text have 1. A
    small one keeps thousands of tokens of a picture from outweighing a question of ten words."""
    eps: float = 1e-8
    """Numerical stabiliser of Eqs. (14), (17) and (59)."""
    recipe: str = PAPER
    """"paper" (Algorithm 1 as published), "refined" (featcal's own: piece by piece inside a block, with targets that
    close a part of the gap of the residual stream) or "informed" (refined, with the experts' task vectors as a prior);
    see docs/theory.md. lam, rho, alpha, beta and mu are the recipe's own where they are left out."""
    beta: float = _BY_RECIPE
    """Not of "paper": share of the residual stream's gap to the expert that output maps are to close, in [0, 1]; above
    0 it needs alpha above 0."""
    mu: float = _BY_RECIPE
    """Of "informed": weight of the prior (`calibration.prior`) against the samples of one task, >= 0; 0 is
    "refined"."""
    weigh_tokens: bool = False
    """Not of "paper": let a token count by how much the expert's task vector does to it (`calibration.weighed_tokens`),
    beside what it counts anyway."""
    augment: int = 0
    """Varied copies of every calibration picture (`samples.vary`), >= 0, none of which needs a label: the target is
    what the expert makes of the same copy. Each costs as much as the picture itself. Of models that read
    pictures alone."""
    batch_size: int = 64
    """Samples per forward pass; changes nothing but time and memory."""
    precision: str = "exact"
    """"exact" (float32 features and products, float64 solve) or "fast" (bfloat16 features and products, float32
    solve; below lam = 1e-3 float32 products and float64 solve)."""

    blocks: Sequence[str] | None = None
    """Blocks that are calibrated, named as in tables ("block 0", "encoder block 3"); None is all of them. Whatever is
    not chosen stays as merged to the last bit, and later blocks see it as it is."""
    maps: Sequence[str] | None = None
    """Kinds of linear maps that are calibrated, with their biases, by the residual part they belong to ("attention",
    "mlp", "cross-attention"); None is all of them. Norms have their own switches."""
    tasks: Sequence[str] | None = None
    """Tasks whose expert and samples count; None is all of them."""

    def __post_init__(self) -> None:
        if self.recipe not in RECIPES:
            raise InputError(f"recipe is '{self.recipe}'; choose {' or '.join(RECIPES)}")
        for name, number in recipe_numbers(self.recipe, self.samples).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, number)
        for name in PARTIAL:
            chosen = getattr(self, name)
            if chosen is not None:  # a tuple, so that options can be hashed
                object.__setattr__(self, name, (chosen,) if isinstance(chosen, str) else tuple(chosen))
                if not getattr(self, name):
                    raise InputError(f"{name} is empty; name at least one, or leave the option out for all")
        for name in (*OF_A_RECIPE, "patch_weight", "image_weight", "eps"):
            if not math.isfinite(getattr(self, name)):
                raise InputError(f"{name} must be a finite number, not {getattr(self, name)}")
        if self.lam < 0:
            raise InputError(f"lam is {self.lam:g}; a ridge strength is >= 0")
        if not 0 <= self.alpha <= 1:
            raise InputError(f"alpha is {self.alpha:g}; an interpolation share lies in [0, 1]")
        if not 0 <= self.beta <= 1:
            raise InputError(f"beta is {self.beta:g}; a share of the gap lies in [0, 1]")
        if self.mu < 0:
            raise InputError(f"mu is {self.mu:g}; the weight of a prior is >= 0")
        for name in (name for name in OF_A_RECIPE if getattr(self, name) and name not in NUMBERS[self.recipe]):
            theirs = " or ".join(f"'{recipe}'" for recipe in RECIPES if name in NUMBERS[recipe])
            raise InputError(f"{name} is {getattr(self, name):g}; it belongs to the recipe {theirs}")
        if self.beta and not self.alpha:
            raise InputError("alpha is 0: beta above 0 needs the experts' features; raise alpha or set beta to 0")
        for name in ("patch_weight", "image_weight"):
            if not 0 < getattr(self, name) <= 1:
                raise InputError(f"{name} is {getattr(self, name):g}; it lies in (0, 1]")
        if self.eps < 0:
            raise InputError(f"eps is {self.eps:g}; it is >= 0")
        if self.weigh_tokens and self.recipe == PAPER:
            raise InputError(f"weigh_tokens belongs to the recipe '{REFINED}' or '{INFORMED}'")
        if self.augment < 0:
            raise InputError(f"augment is {self.augment}; a number of copies is >= 0")
        if self.samples < 1:
            raise InputError(f"samples is {self.samples}; calibration needs at least one sample per task")
        if self.batch_size < 1:
            raise InputError(f"batch_size is {self.batch_size}; it is at least 1")
        if self.precision not in PRECISIONS:
            raise InputError(f"precision is '{self.precision}'; choose {' or '.join(PRECISIONS)}")

    def settings(self) -> dict[str, Any]:
        """Every option by name as tables and model cards show it: chosen parts as one text, and none that were not
        chosen."""
        own = asdict(self)
        parts = {name: ", ".join(own.pop(name) or ()) for name in PARTIAL}
        return own | {name: chosen for name, chosen in parts.items() if chosen}


class Options(TypedDict, total=False):
    """The fields of `CalibrationConfig`, each of which may be left to the suite and the paper by None."""

    lam: float | None
    rho: float | None
    alpha: float | None
    samples: int | None
    seed: int | None
    biases: bool | None
    layernorms: bool | None
    rmsnorms: bool | None
    completion_only: bool | None
    patch_weight: float | None
    image_weight: float | None
    eps: float | None
    batch_size: int | None
    precision: str | None
    recipe: str | None
    beta: float | None
    mu: float | None
    cautious: bool | None
    weigh_tokens: bool | None
    augment: int | None
    blocks: Sequence[str] | None
    maps: Sequence[str] | None
    tasks: Sequence[str] | None


def config_of(adapter: Adapter, tasks: Collection[str], asked: Mapping[str, Any]) -> CalibrationConfig:
    """The options that were asked for over the paper's for an architecture.

    Args:
        tasks: of the suite.

    Raises:
        InputError: a value outside its range, an option switched on that means nothing to the architecture, or a
            block, kind of map or task that there is not.
    """
    if asked.get("augment") and adapter.modality != "pixels":
        raise InputError(
            f"augment varies pictures, and a {adapter.family} model reads text; leave it out, or give more samples"
        )
    idle = sorted(name for name in asked if asked[name] and name in idle_options(adapter))
    if idle:
        raise InputError(f"{', '.join(idle)}: a {adapter.family} model has nothing that this applies to")
    options = dict(asked)
    recipe, cautious = options.get("recipe", PAPER), bool(options.pop("cautious", False))
    own = dict(adapter.defaults)
    if recipe != PAPER:
        own |= recipe_numbers(recipe, options.get("samples", CalibrationConfig.samples), adapter.class_token)
    if cautious:
        said = [name for name in CAUTIOUS if name in options]
        if said or recipe == PAPER:
            why = f"leave {' and '.join(said)} out" if said else f"choose the recipe '{REFINED}' or '{INFORMED}'"
            raise InputError(f"cautious sets alpha and beta of featcal's own recipes; {why}")
        own |= CAUTIOUS
    return resolve_parts(CalibrationConfig(**own | options), adapter, tasks)


def recipe_numbers(recipe: str, samples: int, class_token: bool = True) -> dict[str, float]:
    """Return the numbers that a recipe brings for so many samples per task; the paper's are those for CLIP.

    Args:
        class_token: whether the architecture has one, as CLIP has: with few samples "refined" then takes less of the
            experts' features.
    """
    numbers = {"lam": 0.05, "rho": 2.0, "alpha": 0.3, "beta": 0.0, "mu": 0.0}
    if recipe == REFINED:
        alpha = 0.3 if class_token and samples <= 16 else 0.6
        numbers |= {"lam": refined_lam(samples), "alpha": alpha, "beta": 0.5}
    if recipe == INFORMED:  # the same for every number of samples: the prior holds what few of them do not show
        numbers |= {"lam": 0.001, "alpha": 0.6, "beta": 0.5, "mu": 0.1}
    return numbers


def refined_lam(samples: int) -> float:
    """Ridge strength of the recipe "refined" for so many samples per task: 0.05 up to 8, 0.01 at 16, 0.001 from 64 on,
    log-linear between, to two digits.

    >>> [refined_lam(n) for n in (4, 8, 16, 32, 64, 256)]
    [0.05, 0.05, 0.01, 0.0032, 0.001, 0.001]
    """
    for (few, high), (many, low) in pairwise(_LAM_BY_SAMPLES):
        if samples <= many:
            share = max(0.0, math.log(samples / few) / math.log(many / few))
            return float(f"{high * (low / high) ** share:.2g}")
    return _LAM_BY_SAMPLES[-1][1]


_LAM_BY_SAMPLES = ((8, 0.05), (16, 0.01), (64, 0.001))


def resolve_parts(config: CalibrationConfig, adapter: Adapter, tasks: Collection[str]) -> CalibrationConfig:
    """The same options with every part by its own name and in its own order; all parts are None.

    Several names may be one text with commas between, a block may be named by the prefix of its tensors, and "all",
    where nothing is called so, is every part: it takes back a suite's own choice.

    Raises:
        InputError: unknown names, all of them.
    """
    layers = adapter.block_layers()
    prefixes = dict(zip((block.name for block in adapter.blocks()), layers, strict=True))
    known: Mapping[str, Mapping[str, str]] = {
        "blocks": dict(zip(layers, layers, strict=True)) | prefixes,
        "maps": {part: part for part in adapter.parts()},
        "tasks": {task: task for task in tasks},
    }
    problems: list[str] = []
    found: dict[str, tuple[str, ...] | None] = {}
    for option, names in known.items():
        asked = getattr(config, option)
        every = asked is None or (asked == (ALL,) and ALL not in names)
        chosen = set() if every else {names.get(one, one) for one in _split_names(asked, names)}
        unknown = sorted(chosen - set(names.values()))
        own = tuple(dict.fromkeys(names.values()))
        listed = ", ".join(own) if len(own) <= 8 else f"{own[0]} … {own[-1]}"
        problems += [f"{option}: no '{one}', only {listed}.{did_you_mean(one, own)}" for one in unknown]
        found[option] = None if chosen in (set(), set(own)) else tuple(one for one in own if one in chosen)
    if problems:
        raise InputError(*problems)
    return replace(config, blocks=found["blocks"], maps=found["maps"], tasks=found["tasks"])


def _split_names(asked: Sequence[str], known: Collection[str]) -> list[str]:
    """Names one by one; what is not a name itself is taken apart at its commas."""
    return [part.strip() for one in asked for part in ([one] if one in known else one.split(","))]


def calibrated_blocks(adapter: Adapter, config: CalibrationConfig) -> set[str]:
    """Prefixes of the tensors of every block that is calibrated."""
    named = zip(adapter.blocks(), adapter.block_layers(), strict=True)
    return {block.name for block, layer in named if config.blocks is None or layer in config.blocks}


def calibrated_maps(stage: Stage, block: Block, config: CalibrationConfig) -> dict[str, LinearMap]:
    """Linear maps of a kind that is calibrated, those of the experts of a mixture too, by name inside the block."""
    return {
        name: linear for name, linear in block.maps.items() if config.maps is None or stage.part(name) in config.maps
    }


def idle_options(adapter: Adapter) -> set[str]:
    """Options of `CalibrationConfig` that change nothing for an architecture."""
    blocks = adapter.blocks()
    applies = {
        "biases": any(linear.bias is not None for block in blocks for linear in block.maps.values()),
        "layernorms": any(block.layernorms for block in blocks),
        "rmsnorms": any(stage.norm is not None for stage in adapter.stages),
        "completion_only": adapter.modality == "causal",
        "patch_weight": adapter.class_token or adapter.reads_prompts,
        "image_weight": adapter.image_token is not None,
        "augment": adapter.modality == "pixels",
    }
    return {name for name, does in applies.items() if not does}
