"""Check what must hold for every method: mergers on tensors in memory, other methods on a folder of tiny models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, asdict, dataclass, fields
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from featcal.baselines.common.baseline import Baseline, Sampled, baseline_options
from featcal.baselines.common.fit import fit
from featcal.baselines.common.fitted_model import Fitted
from featcal.export.merge import recipe_for
from featcal.family.opening import Family
from featcal.formats.weights import InMemory, Weights
from featcal.mergers.common.engine import RecipeWeights
from featcal.mergers.common.merger import Merger
from featcal.models.features import final_features
from featcal.models.model import map_features, task_weights
from featcal.session.model_ref import resolve_model
from featcal.suite.methods import NEEDS, SAMPLES, TEST_DATA, Method
from featcal.suite.name_grammar import acts_on_another, grammar, model_name
from featcal.suite.options import facts_of, options_of_class, type_of
from featcal.suite.recipe import MergeRecipe
from featcal.suite.schema import Suite
from featcal.system.errors import InputError
from featcal.testing.trial import TASKS, Trial, assert_that

SHAPES = {"a": (6, 8), "b": (7,), "c": (2, 3, 2), "d": (9, 4), "table": (5, 4)}
"""Shapes of matrices, of other tensors, and of a table with a row per token."""
FEW = {"samples": 3, "steps": 2, "batch": 2, "guard": -1e3}
"""Values for options that make a method cheap, or make it act even on models that it cannot improve."""
NEAR = 1e-9
"""Largest relative deviation of float64 tensors that differ only by rounding."""
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class MergerTrial:
    """A merger, and models in float64 to be merged."""

    kind: type[Merger]

    @cached_property
    def base(self) -> InMemory:
        return _draw("base", 0)

    @cached_property
    def experts(self) -> dict[str, InMemory]:
        drawn = {task: _draw(task, i + 1) for i, task in enumerate(("one", "two", "three"))}
        # Near the base, as fine-tuned experts are: methods that assume so are tried where they belong.
        near = {
            task: {n: self.base.tensors[n] + 0.3 * t for n, t in one.tensors.items()} for task, one in drawn.items()
        }
        return {task: InMemory(task, tensors) for task, tensors in near.items()}

    def open(
        self, experts: Mapping[str, Weights] | None = None, base: Weights | None = None, **settings: Any
    ) -> Weights:
        recipe = MergeRecipe.model_validate({"method": self.kind.kind, **settings})
        return RecipeWeights(recipe, base or self.base, experts or self.experts, [*SHAPES], ["table"])

    def merge(self, experts: Mapping[str, Weights] | None = None, **settings: Any) -> Tensors:
        return self.open(experts, **settings).read(SHAPES)


def check_description(kind: type[Method], **few: Any) -> None:
    """Check that the method describes itself and what it needs, and that its name lists all its options."""
    about = kind.about
    assert_that(bool(about.summary) and about.summary[-1] != ".", "the summary is one phrase without a full stop")
    assert_that({*about.needs} <= {*NEEDS}, f"needs are some of {NEEDS}, not {about.needs}")
    assert_that(kind.kind in grammar(), "the grammar of names does not have it")
    assert_that(acts_on_another(kind.kind) is kind.on_another, "names disagree about whether it acts on another model")
    own_name = model_name(kind(**few).name)
    names = [one.name for one in options_of_class(kind) if one.default is not None]
    assert_that(own_name.kind == kind.kind and [name for name, _ in own_name.options] == names, f"read as {own_name}")
    assert_that(
        [one.name for one in fields(kind)] == [one.name for one in options_of_class(kind)], "a field lacks option()"
    )
    assert_that(all(facts_of(one).help for one in options_of_class(kind)), "an option says nothing of itself")


def check_merger_name(trial: MergerTrial) -> None:
    """Check that a name with all defaults written out gives the same merge as the bare name, and that values outside
    an option's range are refused.
    """
    check_description(trial.kind)
    name = trial.kind().name
    suite = Suite.model_construct(merged="checkpoint")  # no recipe of its own
    _same(trial.merge(**recipe_for(suite, name).settings), trial.merge(), 0.0, "defaults that are said")
    for one, value in _values_beyond(trial.kind):
        options = {one.name: dict.fromkeys(trial.experts, value) if one.default is None else value}
        _require_refusal(partial(trial.kind, **options), one.name, value)
        if one.default is not None:
            text = f"{trial.kind.kind}:{one.name}={value}"
            _require_refusal(partial(recipe_for, suite, text), one.name, value)


def check_identity(trial: MergerTrial) -> None:
    """Check that merging experts that equal the base gives the base."""
    same = dict.fromkeys(trial.experts, trial.base)
    _same(trial.merge(same), trial.base.tensors, NEAR, "experts that are the base")


def check_order(trial: MergerTrial) -> None:
    """Check that the order of the experts makes no difference, if the method declares itself symmetric."""
    if trial.kind.symmetric:
        turned = dict(reversed(trial.experts.items()))
        _same(trial.merge(turned), trial.merge(), NEAR, "experts in another order")


def check_parts(trial: MergerTrial) -> None:
    """Check that tensors read one by one equal those read together, that a second merge has
    the same bits, and that the models stay unchanged.
    """
    before = {task: {n: t.clone() for n, t in one.tensors.items()} for task, one in trial.experts.items()}
    together, apart = trial.open(), trial.open()
    whole = together.read(SHAPES)
    _same({name: apart.read([name])[name] for name in SHAPES}, whole, NEAR, "tensors read one by one")
    # To the bit: a merge is computed when it is read, and may be read again.
    _same(trial.merge(), whole, 0.0, "a second merge")
    for task, tensors in before.items():
        _same(trial.experts[task].tensors, tensors, 0.0, f"expert {task} after the merge")


def check_output_dtypes(trial: MergerTrial) -> None:
    """Check that shapes and dtypes are the base's and all values finite: with three
    experts, with one, and in half precision.
    """
    one = dict([*trial.experts.items()][:1])
    half = InMemory("base", {name: tensor.bfloat16() for name, tensor in trial.base.tensors.items()})
    for base, experts in ((trial.base, trial.experts), (trial.base, one), (half, trial.experts)):
        for name, tensor in trial.open(experts, base).read(SHAPES).items():
            like = base.tensors[name]
            assert_that(
                (tensor.shape, tensor.dtype) == (like.shape, like.dtype), f"'{name}' is {tensor.dtype} {tensor.shape}"
            )
            assert_that(bool(tensor.isfinite().all()), f"'{name}' is not finite")


def check_merger_options(trial: MergerTrial) -> None:
    """Check that every option changes something."""
    _require_effects(trial.kind, lambda options: trial.merge(**options), [*trial.experts])


MERGER_CHECKS: tuple[Callable[[MergerTrial], None], ...] = (
    check_merger_name,
    check_identity,
    check_order,
    check_parts,
    check_output_dtypes,
    check_merger_options,
)


@dataclass(frozen=True)
class BaselineTrial:
    """A method beside calibration, and a tiny suite."""

    kind: type[Baseline]
    trial: Trial

    @property
    def family(self) -> Family:
        return self.trial.family

    @property
    def few(self) -> dict[str, Any]:
        """Return those of the values in `FEW` that are options of the method."""
        own = {one.name for one in options_of_class(self.kind)}
        return {name: value for name, value in FEW.items() if name in own}

    def options(self, **options: Any) -> Baseline:
        return self.kind(**{**self.kind.defaults(self.family), **self.few, **options})

    def fit(self, family: Family | None = None, **options: Any) -> Fitted:
        return fit(family or self.family, self.options(**options))

    def tensors(self, made: Fitted) -> Tensors:
        """Return the model's tensors, those of every task with tensors of its own, and the
        final features after its maps.
        """
        family, found = self.family, made.weights.read(self.family.adapter.tower)
        for task in TASKS:
            inputs = [self.trial.padded_inputs(task)]
            if (own := task_weights(made.weights, task)) is not made.weights:
                found |= {f"{name} of {task}": one for name, one in own.read(family.adapter.tower).items()}
            features = final_features(family.adapter, family.base, {}, inputs, family.compute)
            found[f"features of {task}"] = map_features(made.weights, task, features)
        return found


def check_baseline_name(trial: BaselineTrial) -> None:
    """Check that the method's name is parsed into its options, with the suite's defaults where a name leaves them
    out, and that other values are refused.
    """
    kind, family = trial.kind, trial.family
    check_description(kind, **trial.few)
    own = trial.options()
    assert_that(baseline_options(model_name(own.name), family) == own, f"{own.name} is read as other options")
    whole = resolve_model(kind.kind, family).name
    assert_that(resolve_model(whole, family).name == whole, f"{whole} is read as another name")
    if kind.on_another:
        of = resolve_model(f"{own.name}@expert:{TASKS[0]}", family).name
        assert_that(of == f"{own.name}@expert:{TASKS[0]}", f"the model that it is of is lost in {of}")
    for one, value in _values_beyond(kind):
        _require_refusal(partial(kind, **{one.name: value}), one.name, value)
        model = model_name(f"{kind.kind}:{one.name}={value}")
        _require_refusal(partial(baseline_options, model, family), one.name, value)


def check_record(trial: BaselineTrial) -> None:
    """Check that the record states options and samples, that shapes and dtypes are the base's and values finite, and
    that a second model has the same bits.
    """
    made, again = trial.fit(), trial.fit()
    record, own = made.record, trial.options()
    assert_that(record["options"] == asdict(own) and record["model"] == own.name, f"recorded as {record['model']}")
    sees = {SAMPLES, TEST_DATA} & {*trial.kind.about.needs}
    assert_that(
        bool(sees) is issubclass(trial.kind, Sampled) is bool(record["tasks"]), "samples that it sees are not needed"
    )
    assert_that((record["of"] is not None) is trial.kind.on_another, "the record is wrong about what it acts on")
    found, like = trial.tensors(made), trial.family.base.read(trial.family.adapter.tower)
    for name, tensor in like.items():
        assert_that(
            (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype), f"'{name}' has another kind"
        )
    assert_that(all(bool(tensor.isfinite().all()) for tensor in found.values()), "not finite")
    _same(trial.tensors(again), found, 0.0, "a second model")


def check_merged_model(trial: BaselineTrial) -> None:
    """Check that another merged model changes the result of a method that starts from one, and of no other method."""
    family = trial.family.with_merged(trial.family.experts[TASKS[0]], f"expert:{TASKS[0]}")
    changed = _differ(trial.tensors(trial.fit(family)), trial.tensors(trial.fit()))
    # A method that ignores the merged model must not be listed as acting on one, nor the reverse.
    assert_that(changed is trial.kind.on_another, f"on_another is {trial.kind.on_another}, but that is not so")


def check_baseline_options(trial: BaselineTrial) -> None:
    """Check that every option changes something."""
    _require_effects(trial.kind, lambda options: trial.tensors(trial.fit(**options)), [], trial.few)


BASELINE_CHECKS: tuple[Callable[[BaselineTrial], None], ...] = (
    check_baseline_name,
    check_record,
    check_merged_model,
    check_baseline_options,
)


def _draw(label: str, seed: int) -> InMemory:
    generator = torch.Generator().manual_seed(seed)
    drawn = {n: torch.randn(shape, generator=generator, dtype=torch.float64) for n, shape in SHAPES.items()}
    return InMemory(label, drawn)


def _values_beyond(kind: type[Method]) -> Iterator[tuple[Field[Any], float]]:
    """Yield every bound of an option with a number beyond it."""
    for one in options_of_class(kind):
        facts, number = facts_of(one), type_of(one)
        low = facts.least if facts.above is None else facts.above
        high = facts.most if facts.below is None else facts.below
        if low is not None:
            yield one, number(low if facts.above is not None else low - 1)
        if high is not None:
            yield one, number(high if facts.below is not None else high + 1)


def _other_values(one: Field[Any], default: Any) -> list[Any]:
    """Yield other values of an option within its range, beginning with the most likely to make a difference."""
    facts = facts_of(one)
    if type_of(one) is bool:
        return [not default]
    if type_of(one) is int:
        return [value for value in (int(facts.least or 1), default + 1) if value != default and facts.holds(value)]
    start = 1.0 if default is None else default
    near = [0.5, 0.25, 0.75, 0.95, 0.1, 2 * start, start / 2, 10 * start, 100 * start]
    low = facts.least if facts.above is None else facts.above
    high = facts.most if facts.below is None else facts.below
    if low is not None and high is not None:
        near += [low + share * (high - low) for share in (0.95, 0.05)]
    return [value for value in near if value != default and facts.holds(value)]


def _require_effects(
    kind: type[Method],
    make: Callable[[dict[str, Any]], Tensors],
    tasks: list[str],
    few: Mapping[str, Any] | None = None,
) -> None:
    """Raise AssertionError for an option without any value that makes a difference."""
    own, plain = kind(**few or {}), make({})
    for one in options_of_class(kind):
        tried: list[dict[str, Any]] = [{one.name: value} for value in _other_values(one, getattr(own, one.name))]
        if facts_of(one).by_task and tasks:
            values = _other_values(one, one.default)
            tried = [{one.name: dict(zip(tasks, values, strict=False))}, *(tried if one.default is not None else [])]
        others = ", ".join(str(options[one.name]) for options in tried)
        assert_that(
            any(_changes(make, options, plain) for options in tried),
            f"option '{one.name}' changes nothing: the default {getattr(own, one.name)} gives what {others} give",
        )


def _changes(make: Callable[[dict[str, Any]], Tensors], options: dict[str, Any], plain: Tensors) -> bool:
    try:
        return _differ(make(options), plain)
    except (InputError, ValueError):  # not possible beside the defaults of other options
        return False


def _differ(one: Tensors, other: Tensors) -> bool:
    return any(not tensor.equal(other[name]) for name, tensor in one.items())


def _same(one: Tensors, other: Tensors, within: float, what: str) -> None:
    """Raise AssertionError unless tensors are equal up to a relative deviation."""
    for name, tensor in other.items():
        gap, scale = (one[name] - tensor).double().norm(), tensor.double().norm().clamp(min=1e-12)
        assert_that(one[name].dtype == tensor.dtype and float(gap / scale) <= within, f"{what}: '{name}' is another")


def _require_refusal(read: Callable[[], object], option: str, value: float) -> None:
    try:
        read()
    except (InputError, ValueError) as error:
        assert_that(option in str(error), f"{option}={value} is refused without its name: {error}")
        return
    raise AssertionError(f"{option}={value} is outside the range and accepted")
