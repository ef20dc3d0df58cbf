"""Read mergekit's YAML configurations as suites.

`linear`, `task_arithmetic` and `ties` with one value per parameter become recipes of featcal; the meaning of their
parameters is from mergekit's documentation and from running it. For everything else the merged model is mergekit's
output, and the configuration only names the models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from featcal.authoring.ancestors import find_common_ancestors
from featcal.authoring.common import Imported, model_reference, read_recipe, samples_missing, task_names
from featcal.authoring.mergekit_schema import Configuration, MergekitModel, Module, validate_configuration
from featcal.suite.methods import merger_names, method
from featcal.suite.options import options_of_class
from featcal.suite.recipe import Dtype, MergeRecipe
from featcal.system.errors import InputError
from featcal.system.formatting import did_you_mean

_MODEL_PARAMETERS = ("weight", "density")
_PARAMETERS = (*_MODEL_PARAMETERS, "normalize", "lambda", "int8_mask", "rescale")
"""Parameters of these methods; `int8_mask` and the `density` of `task_arithmetic` change no number."""
_BASE_IS_MERGED = ("slerp", "nearswap", "arcee_fusion")
"""Methods whose `base_model` is one of the merged models, not the one that they were fine-tuned from."""
_DTYPES = get_args(Dtype)
_RUN_IT = "run mergekit and give its output folder with --merged"


def _methods() -> dict[str, str]:
    """Return the mergers that mergekit has too, by mergekit's name."""
    return {method(name).about.mergekit: name for name in merger_names() if method(name).about.mergekit}


def is_configuration(content: Mapping[str, Any]) -> bool:
    """Say whether the content of a file looks like a configuration of mergekit."""
    return "merge_method" in content


def import_mergekit(file: Path, merged: str | None, starts: Sequence[Path]) -> Imported:
    """Convert a configuration of mergekit into a suite.

    Args:
        merged: folder or Hub id of mergekit's output; None asks for a recipe.
        starts: folders that relative paths may start from.

    Raises:
        InputError: lists all problems: unknown keys, methods or parameters for which featcal has no recipe (only
            without `merged`), a vocabulary other than the base's.
    """
    config = validate_configuration(read_recipe(file), str(file))
    base, tasks = _base_and_experts(config, starts)
    problems, notes = list(_vocabulary_problems(config)), list(_notes(config))
    if not tasks:
        problems.append("no model besides base_model; a suite needs at least one expert")
    if merged is None:
        recipe = _Recipe(config, base, tasks)
        content: Any = recipe.content()
        problems += recipe.problems
        notes += recipe.notes
    else:
        content = model_reference(merged, None, starts)
    if problems:
        raise InputError(*(f"{file}: {problem}" for problem in problems))
    about = {"name": file.stem, "description": f"Imported from {file.name} (mergekit, {config.merge_method})."}
    experts = {name: model.to_reference(starts) for name, model in tasks.items()}
    named = None if base is None else base.to_reference(starts)
    if named is None and (named := next(iter(find_common_ancestors([*experts.values()], asks_hub=False)), None)):
        notes.append(f"base is {named}, as the experts' own files name it; {config.merge_method} names none")
    experts_by_task = {name: {"expert": ref} for name, ref in experts.items()}
    no_base = f"base: the model that the experts were fine-tuned from, which {config.merge_method} does not name"
    missing = [*([no_base] if named is None else []), *samples_missing(tasks)]
    return Imported(
        {**about, **({} if named is None else {"base": named}), "merged": content, "tasks": experts_by_task},
        tuple(missing),
        tuple(notes),
    )


@dataclass(frozen=True)
class MergedModels:
    """Models of a configuration, as references of a suite file.

    Args:
        base: the model that the experts were fine-tuned from; None if the method does not name it.
        experts: task → reference.
        coefficients: task → c of merged = base + Σ c (expert - base); None if the recipe has no plain numbers.
        is_exact: whether the method equals this sum; else it only preserves the order of the coefficients.
        notes: remarks on a vocabulary that is not the base's.
        is_uneven: whether it gives layers or tensors values of their own.
        dtype: in which it computes; "" if it names none.
    """

    method: str
    base: str | None
    experts: Mapping[str, str]
    coefficients: Mapping[str, float] | None
    is_exact: bool
    notes: tuple[str, ...]
    is_uneven: bool = False
    dtype: str = ""


def read_contents(content: dict[str, Any], starts: Sequence[Path], label: str) -> MergedModels:
    """Return the models of a configuration with existing output, so that any method is allowed.

    Args:
        content: of the configuration.
        starts: folders that relative paths may start from; `label` names the configuration in messages.

    Raises:
        InputError: lists all mistakes in it.
    """
    config = validate_configuration(content, label)
    base, tasks = _base_and_experts(config, starts)
    coefficients, is_exact = _coefficients(config, base, tasks)
    return MergedModels(
        config.merge_method,
        None if base is None else base.to_reference(starts),
        {task: model.to_reference(starts) for task, model in tasks.items()},
        coefficients,
        is_exact,
        tuple(_vocabulary_problems(config)),
        _is_uneven(config),
        config.dtype or "",
    )


def _base_and_experts(
    config: Configuration, starts: Sequence[Path]
) -> tuple[MergekitModel | None, dict[str, MergekitModel]]:
    """Return the model that the experts were fine-tuned from, if the method names it, and the experts by task."""
    base = None if config.merge_method in _BASE_IS_MERGED else config.base_model
    models = [*config.inputs(), *([config.base_model] if config.base_model else [])]
    experts = [model for model in dict.fromkeys(models) if model != base]
    return base, dict(zip(task_names([model.to_reference(starts) for model in experts]), experts, strict=True))


def _coefficients(
    config: Configuration, base: MergekitModel | None, tasks: Mapping[str, MergekitModel]
) -> tuple[dict[str, float] | None, bool]:
    """Return the coefficient of every expert, and whether the merge equals this sum."""
    recipe = _Recipe(config, base, tasks)
    content = recipe.content()
    if recipe.problems:
        return None, False
    weights, is_mean = content["weights"], bool(content.get("normalize"))
    total = sum(weights.values()) if is_mean else 1.0
    # Without a base of its own, a sum of whole models is no sum of task vectors unless its weights sum to 1.
    if total == 0 or (content["method"] == "linear" and not is_mean):
        return None, False
    scale = content.get("scale", 1.0) / total
    return {task: scale * weight for task, weight in weights.items()}, "density" not in content


def _is_uneven(config: Configuration) -> bool:
    """Say whether layers or tensors have values of their own: slices that differ, gradients, or filtered values."""
    parts: list[Configuration | Module] = [config, *(config.modules or {}).values()]
    places: list[Mapping[str, Any]] = []
    for part in parts:
        slices = part.slices or []
        kinds = [(one.base_model, one.parameters, [(s.model, s.parameters) for s in one.sources]) for one in slices]
        if any(kind != kinds[0] for kind in kinds):
            return True
        places += [part.parameters, *(one.parameters for one in part.models or [])]
        places += [one.parameters for one in slices]
        places += [source.parameters for one in slices for source in one.sources]
    return any(_has_several(value) for place in places for value in place.values())


def _has_several(value: Any) -> bool:
    """Say whether a parameter is a gradient of different values, or has other values for some tensors."""
    if not isinstance(value, (list, dict)):
        return False
    entries = value if isinstance(value, list) else [value]
    own = [one.get("value") if isinstance(one, dict) else one for one in entries]
    numbers = {str(number) for one in own for number in (one if isinstance(one, list) else [one])}
    return len(numbers) > 1 or all(isinstance(one, dict) and one.get("filter") not in (None, "*") for one in entries)


def _vocabulary_problems(config: Configuration) -> Iterator[str]:
    """List reasons why models may read token ids differently."""
    # Samples are tokenized once, by the base's tokenizer.
    tokenizer = config.tokenizer
    sources = {"tokenizer_source": config.tokenizer_source, "tokenizer.source": tokenizer and tokenizer.source}
    base = None if config.base_model is None else config.base_model.model.path
    for key, source in sources.items():
        if source not in (None, "base", base):
            why = "a union has ids that the experts lack" if source == "union" else "its ids need not be the base's"
            yield f"{key}: {source}: every model must have the base's vocabulary, but {why}; use 'base' or leave it out"
    if tokenizer is not None and (tokenizer.tokens or tokenizer.pad_to_multiple_of):
        yield "tokenizer: tokens and pad_to_multiple_of change the vocabulary, and the experts keep theirs; remove them"


def _notes(config: Configuration) -> Iterator[str]:
    if config.chat_template is not None:
        yield "chat_template is not taken over: an exported model has the chat template of the base"
    if config.merge_method == "linear" and config.base_model is not None:
        yield "base is the file's base_model, which linear merges like any other: were the experts fine-tuned from it?"


@dataclass
class _Recipe:
    """A configuration as a recipe of featcal, and the reasons why that may be impossible."""

    config: Configuration
    base: MergekitModel | None
    tasks: Mapping[str, MergekitModel]
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def content(self) -> dict[str, Any]:
        """Return the content of the key `merged` in a suite file; valid only without problems."""
        own, name = _methods(), self.config.merge_method
        if name not in own or self.config.models is None:
            what = f"merge_method '{name}'" if name not in own else "a merge of slices or modules"
            known = f"which has {', '.join(own)} of whole models"
            self.problems.append(f"{what} has no recipe in featcal, {known}; {_RUN_IT}")
            return {}
        self._check_inputs()
        content = self._options() | self._dtype()
        try:
            MergeRecipe.model_validate(content)
        except ValidationError as error:
            # Options that have a problem were replaced by a stand-in, so the recipe's own complaints would mislead.
            if not self.problems:
                self.problems += [str(one["msg"]).removeprefix("Value error, ") for one in error.errors()]
        return content

    def _check_inputs(self) -> None:
        inputs = self.config.models or []
        for model in dict.fromkeys(one.model for one in inputs):
            if sum(one.model == model for one in inputs) > 1:
                self.problems.append(f"models: '{model.to_reference()}' is named twice")
        if self.base is None and self.config.merge_method != "linear":
            self.problems.append(f"base_model: {self.config.merge_method} needs one")
        places: list[tuple[str, Mapping[str, Any], Sequence[str]]] = [("", self.config.parameters, _PARAMETERS)]
        places += [(f" of '{one.model.to_reference()}'", one.parameters, _MODEL_PARAMETERS) for one in inputs]
        for where, parameters, known in places:
            unknown = [name for name in parameters if name not in known]
            self.problems += [f"unknown parameter '{name}'{where}.{did_you_mean(name, known)}" for name in unknown]
        if self._flag("rescale", False):
            self.problems.append(f"rescale: true has no recipe in featcal; {_RUN_IT}")

    def _options(self) -> dict[str, Any]:
        name = self.config.merge_method
        own = _methods()[name]
        takes = {option.name for option in options_of_class(method(own))}
        weights = {task: self._number("weight", model) for task, model in self.tasks.items()}
        normalize = self._flag("normalize", name != "task_arithmetic")
        if name == "linear":
            if self.base is not None:
                return self._with_base_among_the_experts(weights, normalize)
            return {"method": "linear", "weights": weights, "normalize": normalize}
        options = {"method": own, "scale": self._number("lambda", None, 1.0), "weights": weights}
        if "density" in takes:
            options["density"] = {task: self._number("density", model, 1.0) for task, model in self.tasks.items()}
        return options | {"normalize": normalize}

    def _with_base_among_the_experts(self, weights: Mapping[str, float], normalize: bool) -> dict[str, Any]:
        """Convert sum_i w_i theta_i / W, over base and experts, into theta_0 + sum_i (w_i / W) tau_i over the
        experts."""
        total = sum(weights.values()) + self._number("weight", self.base)
        if not normalize or total == 0:
            self.problems.append(
                f"linear with base_model and without normalized weights has no recipe in featcal; {_RUN_IT}"
            )
            return {}
        shares = {task: weight / total for task, weight in weights.items()}
        return {"method": "task-arithmetic", "scale": 1.0, "weights": shares}

    def _dtype(self) -> dict[str, str]:
        config = self.config
        wanted = config.out_dtype or config.dtype
        if wanted is not None and wanted not in _DTYPES:
            self.problems.append(f"dtype '{wanted}' is not one of {', '.join(_DTYPES)}; {_RUN_IT}")
        # In float32 the two differ by rounding alone, which is not worth a note.
        if config.dtype != "float32":
            precision = config.dtype or "the models' own dtype"
            self.notes.append(
                f"featcal merges in float64 where mergekit computes in {precision}; if that is half precision its "
                "output differs, most of all after trimming: give its folder with --merged to calibrate just that"
            )
        return {} if wanted is None else {"dtype": wanted}

    def _value(self, name: str, model: MergekitModel | None, default: Any) -> Any:
        """Look up a parameter as mergekit does: the model's own, else the file's."""
        own = next((one.parameters for one in self.config.models or [] if one.model == model), {})
        return own.get(name, self.config.parameters.get(name, default))

    def _number(self, name: str, model: MergekitModel | None, default: float | None = None) -> float:
        value = self._value(name, model, default)
        of = "" if model is None else f" of '{model.to_reference()}'"
        if isinstance(value, (list, dict)):
            self.problems.append(f"{name}{of}: gradients and filtered values have no recipe in featcal; {_RUN_IT}")
        elif value is None:
            self.problems.append(f"{name}{of}: missing; mergekit needs one for every model")
        else:
            try:
                return float(str(value))  # YAML reads 1e-3 as a string
            except ValueError:
                self.problems.append(f"{name}{of}: '{value}' is not a number")
        return 1.0

    def _flag(self, name: str, default: bool) -> bool:
        value = self._value(name, None, default)
        if value not in (True, False):
            self.problems.append(f"{name}: true or false, not {value!r}")
            return default
        return bool(value)
