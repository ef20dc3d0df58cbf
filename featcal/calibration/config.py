"""Resolve the options of a calibration for an architecture."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

from featcal.models.adapter import Adapter, Block, Stage
from featcal.models.linear_maps import LinearMap, widths
from featcal.suite.calibration_options import (
    CAUTIOUS,
    INFORMED,
    OF_A_RECIPE,
    PAPER,
    RECIPES,
    SHORTHANDS,
    CalibrationConfig,
    recipe_numbers,
)
from featcal.suite.methods import ALL
from featcal.suite.schema import Suite
from featcal.system.errors import InputError
from featcal.system.formatting import did_you_mean

T = TypeVar("T")


def resolve_recipe(adapter: Adapter, tasks: Collection[str], asked: Mapping[str, Any]) -> CalibrationConfig:
    """Complete the given options with the recipe's numbers for the architecture.

    Args:
        tasks: of the suite.

    Raises:
        InputError: a value outside its range, an option without effect for the architecture, or a block, kind of map or
            task that does not exist.
    """
    if asked.get("augment") and adapter.modality != "pixels":
        raise InputError(
            f"augment makes varied copies of pictures, but a {adapter.family} model reads text; leave it out, or give "
            "more samples"
        )
    _refuse_idle(adapter, [name for name in asked if asked[name]])
    options = {name: value for name, value in adapter.defaults.items() if name not in OF_A_RECIPE} | dict(asked)
    if options.pop("cautious", False):
        recipe = options.get("recipe", PAPER)
        cautious_options = [name for name in CAUTIOUS if name in options]
        if cautious_options or recipe not in SHORTHANDS["cautious"].recipes:
            theirs = " or ".join(f"'{one}'" for one in SHORTHANDS["cautious"].recipes)
            why = f"leave {' and '.join(cautious_options)} out" if cautious_options else f"choose the recipe {theirs}"
            raise InputError(f"cautious sets alpha and beta of featcal's own recipes; {why}")
        options |= CAUTIOUS
    return resolve_options(CalibrationConfig(**options), adapter, tasks)


def options_without_base(suite: Suite) -> dict[str, Any]:
    """Return default options for a suite whose base is unknown: rho 1, with which the
    anchor is the merged model. None if the base is known.
    """
    return {"rho": 1.0} if suite.base is None else {}


def require_base(config: CalibrationConfig, suite: Suite) -> None:
    """Raise InputError if the base is not known and the options need it; names these options."""
    if suite.base is not None:
        return
    needs = {
        f"rho is {config.rho:g}, an anchor on the way from it to the merged model and beyond": config.rho != 1,
        f"mu is {config.mu:g}, a prior of task vectors, which start at it": config.mu != 0,
        "weigh_tokens goes by task vectors, which start at it": config.weigh_tokens,
    }
    asked = [need for need, is_asked in needs.items() if is_asked]
    if asked:
        raise InputError(
            f"the base is not known: {'; '.join(asked)}. Name it in the suite file ('base: REFERENCE'), or take rho 1 "
            "and the recipe 'paper' or 'refined'"
        )


def usable_recipes(adapter: Adapter, is_base_known: bool) -> tuple[str, ...]:
    """Return the recipes whose defaults apply: to an architecture that featcal found by itself the paper's alone,
    without a base those without a prior."""
    own = (PAPER,) if adapter.limits else RECIPES
    return tuple(one for one in own if is_base_known or one != INFORMED)


def config_of_suite(suite: Suite, adapter: Adapter | None) -> CalibrationConfig:
    """Return the options that a suite recommends, completed with the recipe's for the architecture.

    Args:
        adapter: None if the architecture is unknown.

    Raises:
        InputError: as `resolve_recipe`; the message says that these are the suite's options.
    """
    asked = options_without_base(suite) | suite.calibration.explicit_options()
    try:
        return CalibrationConfig(**asked) if adapter is None else resolve_recipe(adapter, suite.tasks, asked)
    except InputError as error:
        raise InputError(*(f"calibration options of the suite: {problem}" for problem in error.problems)) from None


def resolve_options(config: Any, adapter: Adapter, tasks: Collection[str]) -> CalibrationConfig:
    """Return complete options: all numbers set, all parts by their own names.

    Missing numbers get the recipe's values for the architecture and the number of samples. Parts get their own names
    and order; None means all parts of a kind. One text may hold several names with commas, a block may be named by the
    prefix of its tensors, and "all", if no part has that name, means every part, which overrides a suite's own choice.

    Raises:
        InputError: an option or a part does not exist; the message lists all of them.
    """
    if not isinstance(config, CalibrationConfig):
        kind = type(config).__name__
        raise InputError(
            f"give the options of a calibration as featcal.CalibrationConfig(lam=0.05, …), not as a {kind}"
        )
    # What is on by default means nothing to many architectures, and was not asked for.
    given = {name: value for name, value in asdict(config).items() if value != getattr(CalibrationConfig, name)}
    _refuse_idle(adapter, [name for name, value in given.items() if value])
    if adapter.limits and config.recipe != PAPER:
        raise InputError(f"recipe '{config.recipe}': {adapter.limits}")
    if config.is_quantized:
        _check_grid(config, adapter)
    return replace(_fill_numbers(config, adapter), **dict[str, Any](_find_parts(config, adapter, tasks)))


def _refuse_idle(adapter: Adapter, asked: Sequence[str]) -> None:
    """Raise InputError if given options have no effect for an architecture; names them."""
    idle = sorted({*asked} & idle_options(adapter)) if asked else []
    if idle:
        raise InputError(f"{', '.join(idle)}: a {adapter.family} model is not affected by this option; leave it out")


def _check_grid(config: CalibrationConfig, adapter: Adapter) -> None:
    """Check that the linear maps of an architecture can be packed, and that groups of columns fit their inputs.

    Raises:
        InputError: they cannot be packed; the message says why.
    """
    kind = f"quantize: a {adapter.family} model"
    if not adapter.reads_packed:
        raise InputError(f"{kind} with packed weights cannot be loaded by {adapter.library}; leave quantize out")
    maps = [(block.stored_name(name), module) for block in adapter.blocks() for name, module in block.maps.items()]
    if any(block.mixtures for block in adapter.blocks()):
        raise InputError(f"{kind} has experts of a mixture, which featcal does not quantise; leave quantize out")
    # Of one stored tensor several maps have a part, or a class other than Linear stores its transpose.
    if adapter.transposed_weights or len({name for name, _ in maps}) < len(maps):
        raise InputError(f"{kind} does not store a matrix [outputs, inputs] per linear map; leave quantize out")
    inputs = sorted({widths(module)[0] for _, module in maps})
    if config.group_size and any(width % config.group_size for width in inputs):
        fitting = max(size for size in range(1, config.group_size + 1) if not any(width % size for width in inputs))
        raise InputError(
            f"group_size {config.group_size} does not divide the inputs of all maps ({', '.join(map(str, inputs))}), "
            f"as the layout needs; {fitting} does, and 0 gives every row one scale"
        )


def _fill_numbers(config: CalibrationConfig, adapter: Adapter) -> CalibrationConfig:
    """Fill in the recipe's numbers for the architecture and the samples where none are given."""
    numbers = recipe_numbers(config.recipe, config.samples, adapter.class_token)
    if config.recipe == PAPER:  # which publishes other values for other architectures
        numbers |= {name: adapter.defaults[name] for name in OF_A_RECIPE if name in adapter.defaults}
    left_out: dict[str, Any] = {name: numbers[name] for name in OF_A_RECIPE if getattr(config, name) is None}
    return replace(config, **left_out)


def all_parts(adapter: Adapter, tasks: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return every block, kind of maps and task, by option; these values override a suite's own choice."""
    return {"blocks": tuple(adapter.block_layers()), "maps": tuple(adapter.parts()), "tasks": tuple(tasks)}


def _find_parts(
    config: CalibrationConfig, adapter: Adapter, tasks: Collection[str]
) -> dict[str, tuple[str, ...] | None]:
    """Return the chosen parts by option, with their own names and in their own order; None for all parts of a kind.

    Raises:
        InputError: there are unknown names; the message lists all.
    """
    problems: list[str] = []
    found: dict[str, tuple[str, ...] | None] = {}
    for option, own in all_parts(adapter, tasks).items():
        asked, names = getattr(config, option), {one: one for one in own}
        if option == "blocks":
            names |= adapter.block_names()
        every = asked is None or (asked == (ALL,) and ALL not in names)
        chosen = set() if every else {names.get(one, one) for one in _split_names(asked, names)}
        unknown = sorted(chosen - set(own))
        listed = ", ".join(own) if len(own) <= 8 else f"{own[0]} … {own[-1]}"
        problems += [f"{option}: no '{one}', only {listed}.{did_you_mean(one, own)}" for one in unknown]
        # All parts by name and no choice at all are the same calibration, and get the same record.
        found[option] = None if chosen in (set(), set(own)) else tuple(one for one in own if one in chosen)
    if problems:
        raise InputError(*problems)
    return found


def _split_names(asked: Sequence[str], known: Collection[str]) -> list[str]:
    """Split texts that are not a name themselves at their commas; return all names."""
    parts = (part for one in asked for part in ([one] if one in known else map(str.strip, one.split(","))))
    return [part for part in parts if part]


def select_tasks(config: CalibrationConfig, tasks: Mapping[str, T]) -> dict[str, T]:
    """Return the entries of the tasks that the options calibrate on, in the order of the tasks."""
    return {task: one for task, one in tasks.items() if config.tasks is None or task in config.tasks}


def calibrated_blocks(adapter: Adapter, config: CalibrationConfig) -> set[str]:
    """Return the prefixes of the tensors of every block that is calibrated."""
    return {name for name, layer in adapter.block_names().items() if config.blocks is None or layer in config.blocks}


def calibrated_maps(stage: Stage, block: Block, config: CalibrationConfig) -> dict[str, LinearMap]:
    """Return the linear maps of calibrated kinds by name inside the block, including those of experts of a mixture and,
    if the options ask for it, its router."""
    known = {**block.maps, **(block.routers if config.routers else {})}
    return {name: linear for name, linear in known.items() if config.maps is None or stage.part(name) in config.maps}


def idle_options(adapter: Adapter) -> set[str]:
    """Return the options of `CalibrationConfig` that have no effect for an architecture."""
    blocks = adapter.blocks()
    applies = {
        "biases": any(linear.bias is not None for block in blocks for linear in block.maps.values()),
        "layernorms": any(block.layernorms for block in blocks),
        "rmsnorms": any(stage.norm is not None for stage in adapter.stages),
        "routers": any(block.routers for block in blocks),
        "completion_only": adapter.modality == "causal",
        "patch_weight": adapter.class_token or adapter.reads_prompts,
        "image_weight": adapter.image_token is not None,
        "augment": adapter.modality == "pixels",
    }
    return {name for name, does in applies.items() if not does}
