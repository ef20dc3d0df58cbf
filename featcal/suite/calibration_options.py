"""Define the options of a calibration, each once: a field of `CalibrationConfig` with an `Option` beside its default.

The suite file, the command line, the app, names of models, printed commands and docs/options.md are derived from these
fields. Nothing here needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from typing import Any

from featcal.suite.options import OptionFacts
from featcal.system.errors import InputError
from featcal.system.formatting import exactly

PAPER, REFINED, INFORMED = RECIPES = ("paper", "refined", "informed")
"""Ways to calibrate a block. PAPER: from one snapshot, as published. REFINED: piece by piece, featcal's own. INFORMED:
refined with a prior from the experts' weights."""
PRECISIONS = ("exact", "fast")
QUANTIZED = ("off", "int8", "int4", "int8-nearest", "int4-nearest")
"""Values of `quantize`."""
_OWN = (REFINED, INFORMED)


CAUTIOUS: Mapping[str, float] = {"alpha": 0.3, "beta": 0.0}
"""Values that `cautious` sets."""
_LAM_BY_SAMPLES = ((8, 0.05), (16, 0.01), (64, 0.001))


def recipe_numbers(recipe: str, samples: int, class_token: bool = True) -> dict[str, float]:
    """Return the default numbers of a recipe for so many samples per task; the paper's are those for CLIP.

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
    """Return the ridge strength of "refined" for so many samples per task: 0.05 up to 8, 0.01 at 16, 0.001 from 64 on,
    log-linear between, to two digits.

    >>> [refined_lam(n) for n in (4, 8, 16, 32, 64, 256)]
    [0.05, 0.05, 0.01, 0.0032, 0.001, 0.001]
    """
    for (few, high), (many, low) in pairwise(_LAM_BY_SAMPLES):
        if samples <= many:
            share = max(0.0, math.log(samples / few) / math.log(many / few))
            return float(f"{high * (low / high) ** share:.2g}")
    return _LAM_BY_SAMPLES[-1][1]


@dataclass(frozen=True, kw_only=True)
class Option(OptionFacts):
    """Facts about an option, from which everything that shows, reads or writes it is derived.

    Args:
        help: what it does, in one or two sentences that `--help`, the app and docs/options.md share.
        kind: float, int, bool (on or off), str (one of `choices`) or tuple (names of parts).
        left_out: its default, in words.
        label: text of its control in the app; without one the app has no control for it.
        symbol: the letter that the paper or featcal has for it.
        recipes: those that use it; with the others it is 0 or off.
        steps: values that a slider offers.
        of_recipe: whether every recipe has a default of its own for it.
        idle: whether it changes only time, memory and the order of sums.
    """

    kind: type
    left_out: str
    label: str = ""
    symbol: str = ""
    choices: tuple[str, ...] = ()
    recipes: tuple[str, ...] = RECIPES
    steps: tuple[float, ...] = ()
    of_recipe: bool = False
    idle: bool = False

    def check(self, name: str, value: Any) -> Any:
        """Check a value of the option called `name` and return it, a number as Python's own.

        Raises:
            InputError: it is of another type, or out of range.
        """
        if self.choices and value not in self.choices:
            raise InputError(f"{name} is '{value}'; choose {' or '.join(self.choices)}")
        return self.require(name, value, self.kind)


def _option(default: Any, help: str, **more: Any) -> Any:
    """Return the field of an option with a fixed default, from which its kind follows."""
    left_out = ("off", "on")[default] if isinstance(default, bool) else _format_default(default)
    return field(default=default, metadata={_OPTION: Option(help=help, kind=type(default), left_out=left_out, **more)})


def _number(name: str, help: str, paper: str = "", **more: Any) -> Any:
    """Return the field of a number whose default depends on recipe, architecture and samples.

    Args:
        paper: its values in the paper, which depend on the architecture.
    """
    left_out: dict[str, list[str]] = {paper: [PAPER]} if paper else {}
    for recipe in _OWN:
        few, many = (recipe_numbers(recipe, samples)[name] for samples in (8, 64))
        words = exactly(many) + (f", {exactly(few)} with few samples" if few != many else "")
        left_out.setdefault(words, []).extend([recipe] if many else [])
    summary = "; ".join(f"{' and '.join(recipes)}: {words}" for words, recipes in left_out.items() if recipes)
    option = Option(help=help, kind=float, left_out=summary, of_recipe=True, **more)
    return field(default=None, metadata={_OPTION: option})


def _parts(help: str, label: str) -> Any:
    """Return the field of an option that chooses parts by name; the default is all of them."""
    return field(default=None, metadata={_OPTION: Option(help=help, kind=tuple, left_out="all", label=label)})


def _format_default(value: float | str) -> str:
    return exactly(value) if isinstance(value, float) else str(value)


_OPTION = "option"
_LAM = (*(float(f"{digit}e{power}") for power in range(-7, 1) for digit in (1, 2, 5)), 10.0)
_SHARES = tuple(step / 20 for step in range(21))


@dataclass(frozen=True)
class CalibrationConfig:
    """Options of Algorithm 1. The numbers of a recipe (lam, rho, alpha, beta, mu) are None until
    `calibration.config.resolve_options` fills in the recipe's defaults for the architecture and the number of samples;
    every function that calibrates does so. `calibration.calibrate.config_for` returns the options that a suite
    recommends.

    Raises:
        InputError: a value of another type or outside its range; the message names the option.

    >>> import featcal
    >>> config = featcal.CalibrationConfig(samples=8, recipe="informed", lam=0.1)
    >>> featcal.calibrate(featcal.load_suite("lm-mini"), config).config.rho  # the recipe's own
    2.0
    >>> try:
    ...     featcal.CalibrationConfig(lam=-1)
    ... except featcal.InputError as error:
    ...     print(error)
    lam is -1; it is at least 0 and finite
    """

    # fmt: off
    lam: float = _number(
        "lam", "Ridge strength, the pull towards the anchor (Eq. 12). Raise it with few or bad samples, or after a "
        "warning that calibration raised drift; 0 needs features of full rank.",
        "0.05 for CLIP, 1e-5 for language models", label="λ, ridge strength", symbol="λ", least=0, steps=_LAM,
    )
    rho: float = _number(
        "rho", "Anchor = ρ merged + (1 − ρ) base (Eq. 11): 1 is the merged model, more extrapolates beyond it. "
        "Without a known base only 1 is possible.",
        "2, and 0.5 for decoder-only models", label="ρ, anchor", symbol="ρ",
        steps=tuple(step / 10 for step in range(41)),
    )
    alpha: float = _number(
        "alpha", "Share of the expert's own input features in the targets (Eq. 10); the rest are those of the "
        "calibrated model. Lower it if the samples are unlike the inputs to come.",
        "0.3 for CLIP, 0.6 for T5, 0.15 for decoder-only models", label="α, expert features", symbol="α",
        least=0, most=1, steps=_SHARES,
    )
    samples: int = _option(
        256, "Calibration samples per task, without labels; a task with fewer gives all of them. 64 give most of "
        "the gain, and time and memory grow in proportion.",
        label="Calibration samples per task", symbol="n", least=1, steps=(8, 16, 32, 64, 128, 256),
    )
    seed: int = _option(
        42, "Seed, together with the task's name, of the random choice of calibration samples. Other seeds show how "
        "much the choice matters.", label="Seed", least=0,
    )
    biases: bool = _option(
        True, "Calibrate biases: each corrects the mean error that the new weights leave (Eq. 55).",
        label="Calibrate biases",
    )
    layernorms: bool = _option(
        True, "Calibrate scale and shift of every LayerNorm (Eq. 59).", label="Calibrate LayerNorms",
    )
    rmsnorms: bool = _option(
        False, "Calibrate scales of RMSNorms: featcal's extension of Eq. 59, which the paper does not use.",
        label="Calibrate RMSNorms",
    )
    routers: bool = _option(
        False, "For mixtures of experts: calibrate the routers too, the linear maps from a token's state to the "
        "experts' scores (featcal's extension). The gain is small on the mixtures that were measured.",
        label="Calibrate routers",
    )
    completion_only: bool = _option(
        False, "For decoder-only models: use only the positions that predict the answer, not the prompt; in a text "
        "without a prompt all positions count. It can help long answers and hurt short ones.",
        label="Count answers alone",
    )
    patch_weight: float = _option(
        0.01, "Weight of CLIP's patch tokens in the last block, where the class token has 1; inputs of keys and values "
        "always have 1.", above=0, most=1,
    )
    image_weight: float = _option(
        1.0, "Weight of a picture's tokens in a language model that reads pictures; text has 1. Lower it if the many "
        "tokens of pictures outweigh the text.", above=0, most=1,
    )
    eps: float = _option(1e-8, "Numerical stabiliser of Eqs. (14), (17) and (59); there is rarely a reason to change "
        "it.", least=0)
    recipe: str = _option(
        PAPER, "paper: Algorithm 1 as published. refined: featcal's own, fits a block piece by piece. informed: "
        "refined with a prior about the experts' training inputs, estimated from their weights; try it first, it "
        "takes about a quarter more time and needs the base (docs/theory/recipes.md).", label="Recipe",
        choices=RECIPES,
    )
    beta: float = _number(
        "beta", "Share of the residual stream's gap to the expert that output maps should close. Lower it if the "
        "samples are corrupted; above 0 it needs alpha above 0.",
        label="β, stream", symbol="β", least=0, most=1, recipes=_OWN, steps=_SHARES,
    )
    mu: float = _number(
        "mu", "Weight of the prior about the experts' training inputs, relative to the samples of one task; 0 gives "
        "the recipe refined.", label="μ, prior", symbol="μ", least=0, recipes=(INFORMED,),
        steps=(0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 3.0, 10.0),
    )
    weigh_tokens: bool = _option(
        False, "Weight every token by how strongly the expert's task vector acts on it. It helps most with text and "
        "takes a tenth more time.", label="Weigh tokens", recipes=_OWN,
    )
    decisions: float = _option(
        0.0, "Weight of the margin-aware term: 0 is the plain squared error; towards 1 only output directions that "
        "move an expert's margin count. 0.7 helps if many tasks share a model; it needs heads and one backward pass "
        "per expert, and takes nearly twice the time.",
        label="δ, decisions", symbol="δ", least=0, below=1, recipes=_OWN,
    )
    augment: int = _option(
        0, "Augmented copies of every calibration picture, each as expensive as one more picture. 1 helps, or 3 with "
        "fewer than 32 samples per task.",
        label="Copies", least=0,
    )
    quantize: str = _option(
        "off", "Round the solved linear maps to integers of 8 or 4 bits, column by column so that the calibrated "
        "outputs change least, and store them packed. On lm-mini 8 bits cost nothing measurable and 4 bits half a "
        "point. int8-nearest and int4-nearest round every weight by itself, for comparison.", choices=QUANTIZED,
    )
    group_size: int = _option(
        128, "With quantize: number of input columns of a row that share a scale; 0 gives every row one scale. "
        "Smaller groups are more exact and make larger files.", least=0,
    )
    batch_size: int = _option(
        64, "Samples per forward pass. Lower it if memory runs out; numbers change only by rounding.",
        least=1, idle=True,
    )
    precision: str = _option(
        "exact", "exact: float32 features and products, float64 solve. fast: bfloat16 features and products, float32 "
        "solve, in about 0.6 of the time; below lam 0.02 float32 products and float64 solve, in 0.8 of the time. It is "
        "slow on processors without bfloat16.",
        choices=PRECISIONS,
    )

    blocks: Sequence[str] | None = _parts(
        "Calibrate only these blocks ('block 0', 'encoder block 3'). The others stay as merged to the last bit, and "
        "later blocks see them unchanged.", "Blocks",
    )
    maps: Sequence[str] | None = _parts(
        "Calibrate only these kinds of linear maps, with their biases: attention, mlp, cross-attention. Norms have "
        "their own switches.", "Kinds of linear maps",
    )
    tasks: Sequence[str] | None = _parts(
        "Calibrate only on the experts and samples of these tasks.", "Tasks",
    )
    # fmt: on

    def __post_init__(self) -> None:
        OPTIONS["recipe"].check("recipe", self.recipe)
        for name in PARTIAL:
            chosen = getattr(self, name)
            if chosen is not None:  # a tuple, so that options can be hashed
                OPTIONS[name].check(name, chosen)
                object.__setattr__(self, name, (chosen,) if isinstance(chosen, str) else tuple(chosen))
                if not getattr(self, name):
                    raise InputError(f"{name} is empty; name at least one, or leave the option out for all")
        for name, known in OPTIONS.items():
            value = getattr(self, name)
            # What is left open is filled in later, and nothing else is.
            if value is not None or not (known.of_recipe or known.kind is tuple):
                value = known.check(name, value)
                object.__setattr__(self, name, value)
            # 0 and off are what an option is where its recipe is another one, so they may be given with any.
            if value and self.recipe not in known.recipes:
                theirs = " or ".join(f"'{recipe}'" for recipe in known.recipes)
                subject = name if known.kind is bool else f"{name} is {value:g}; it"
                raise InputError(f"{subject} belongs to the recipe {theirs}")
        if self.decisions and self.routers:
            raise InputError(f"decisions is {self.decisions:g}: routers cannot go with it; leave one of them out")
        if self.beta and self.alpha == 0:
            raise InputError("alpha is 0: beta above 0 needs the experts' features; raise alpha or set beta to 0")

    @property
    def is_quantized(self) -> bool:
        """Say whether solved linear maps are rounded to a grid and packed."""
        return self.quantize != QUANTIZED[0]

    def settings(self) -> dict[str, Any]:
        """Return every option by name as tables and model cards show it: chosen parts as one text, if there are any."""
        own = asdict(self)
        parts = {name: ", ".join(own.pop(name) or ()) for name in PARTIAL}
        return own | {name: chosen for name, chosen in parts.items() if chosen}


OPTIONS: Mapping[str, Option] = {one.name: one.metadata[_OPTION] for one in fields(CalibrationConfig)}
"""Every option by name, in the order of the fields."""
PARTIAL = tuple(name for name, one in OPTIONS.items() if one.kind is tuple)
"""Options that choose a part of what is calibrated, or of what it is calibrated on."""
SWITCHES = tuple(name for name, one in OPTIONS.items() if one.kind is bool)
"""Options that are on or off."""
OF_A_RECIPE = tuple(name for name, one in OPTIONS.items() if one.of_recipe)
"""Numbers for which every recipe has defaults of its own."""
CHOSEN = ("recipe", *OF_A_RECIPE, "decisions")
"""Options by which the candidates of a choice without labels differ; all other options are the same for all."""
NUMBERS: Mapping[str, tuple[str, ...]] = {
    recipe: tuple(name for name in OF_A_RECIPE if recipe in OPTIONS[name].recipes) for recipe in RECIPES
}
"""The numbers that each recipe uses; the others are 0 there."""
OWN = tuple(name for name, one in OPTIONS.items() if one.of_recipe or one.recipes != RECIPES)
"""Options that a suite recommends for one recipe only."""
IDLE = tuple(name for name, one in OPTIONS.items() if one.idle)
"""Options that change only time and memory."""
SHORTHANDS: Mapping[str, Option] = {
    "cautious": Option(
        kind=bool,
        help=f"Set {' and '.join(f'{name} {value:g}' for name, value in CAUTIOUS.items())}. Use it for calibration "
        "samples unlike the inputs to come, such as fog; with clean or merely noisy ones it costs two points.",
        left_out="off", label="Cautious", recipes=_OWN,
    )
}  # fmt: skip
"""Options that stand for values of others; names, commands and records show these values instead."""
ASKED: Mapping[str, Option] = {**OPTIONS, **SHORTHANDS}
"""All options that can be given by name."""
