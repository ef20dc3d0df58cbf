"""Define a suite: one base, one merged model, the task experts and where their samples come from.

A suite file is YAML; it is validated completely before anything is read or downloaded, unknown keys are
refused with a suggestion, and no file may name code to run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack

from pydantic import (
    BaseModel,
    Field,
    PrivateAttr,
    ValidationError,
    create_model,
    model_validator,
)

from featcal.suite.calibration_options import OPTIONS, Option
from featcal.suite.methods import ALL
from featcal.suite.recipe import MergeRecipe
from featcal.suite.source import Source
from featcal.suite.strict import Strict
from featcal.system.errors import InputError
from featcal.system.formatting import did_you_mean, shorten
from featcal.system.paths import expand_home, local_path
from featcal.system.resources import embedded_suites, ready_suites, task_files
from featcal.system.sandbox import require_inside
from featcal.system.yaml_files import read_yaml

if TYPE_CHECKING:
    from featcal.suite.objects import SuiteOptions

Reference = Annotated[str, Field(min_length=1)]
"""Folder (relative to the suite file), Hub id, optionally with a folder inside it and `@revision`, or `open_clip:…`;
`REF+ADAPTER` is a model with a LoRA adapter."""

SPLITS = ("calibration", "validation", "test")


class _Recommended(Strict):
    """Options that a suite recommends for its calibration; `CalibrationConfig` checks their range."""

    def explicit_options(self) -> dict[str, Any]:
        """Return the options that the suite sets, by name."""
        return self.model_dump(exclude_none=True)


def _type_of(option: Option) -> Any:
    """Return the type annotation of an option in a suite file, or None."""
    if option.kind is tuple:
        return tuple[str, ...] | None
    if option.choices:
        return Literal[option.choices] | None
    kind: Any = option.kind
    return kind | None


if TYPE_CHECKING:
    CalibrationDefaults = _Recommended
else:  # the fields are those of CalibrationConfig
    CalibrationDefaults = create_model(
        "CalibrationDefaults", __base__=_Recommended, **{name: (_type_of(one), None) for name, one in OPTIONS.items()}
    )


class Task(Strict):
    """One task: its expert, its samples and how its answers are scored."""

    expert: Reference
    """The model that was fine-tuned on this task."""
    calibration: Source | None = None
    """Samples to calibrate on; they need no labels."""
    validation: Source | None = None
    """Samples to measure on and to choose options with."""
    test: Source | None = None
    """Samples for the final table; every use of them is counted."""
    classes: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Class names in label order; the default are the source's own names. They are matched with the names of the source
    and of the head (`samples.class_names`)."""
    templates: tuple[str, ...] = ("a photo of a {}.",)
    """Prompts of pictures; {} is where the class name goes."""
    metric: Literal["accuracy", "exact_match", "spearman"] = "accuracy"
    """The default is `accuracy` for pictures and for texts with classes (`label` without `targets`), `exact_match` for
    texts with answers, `spearman` for pairs of texts with a number."""
    max_length: Annotated[int, Field(gt=1)] = 512
    """Most tokens of one input. The default comes from a folder of sentence-transformers, if it has one."""
    max_target_length: Annotated[int, Field(gt=1)] = 32
    """Most tokens of one answer, including its end token."""

    @property
    def says_length(self) -> bool:
        """Say whether the suite file sets `max_length`, which then overrides a model's own files."""
        return "max_length" in self.model_fields_set

    @model_validator(mode="before")
    @classmethod
    def _text_is_matched_exactly(cls, content: Any) -> Any:
        if isinstance(content, dict) and "metric" not in content:
            sources = [source for split in SPLITS if isinstance(source := content.get(split), dict)]
            classified = any("label" in source and "targets" not in source for source in sources)
            if any({"pair", "target"} <= source.keys() for source in sources):
                return {**content, "metric": "spearman"}
            if (
                any({"input", "conversation", "self_generated"} & source.keys() for source in sources)
                and not classified
            ):
                return {**content, "metric": "exact_match"}
        return content

    @model_validator(mode="after")
    def _models_are_measured_on_what_others_wrote(self) -> Task:
        if any(source is not None and source.self_generated is not None for source in (self.validation, self.test)):
            raise ValueError("'self_generated' text is for calibration alone; give validation and test another source")
        return self

    @model_validator(mode="after")
    def _templates_have_a_place(self) -> Task:
        without = [template for template in self.templates if "{}" not in template]
        if without or not self.templates:
            raise ValueError(f"templates need one {{}} where the class name goes (see {without or 'an empty list'})")
        return self

    @model_validator(mode="after")
    def _metric_fits(self) -> Task:
        sources = [source for source in (self.calibration, self.validation, self.test) if source is not None]
        if any(source.has_classes for source in sources):
            if self.metric != "accuracy":
                raise ValueError("texts with classes ('label' without 'targets') are scored by accuracy")
            if "templates" in self.model_fields_set:
                raise ValueError("'templates' make prompts for pictures; remove them from a text task")
        elif any(source.has_pairs for source in sources) and self.metric != "spearman":
            raise ValueError("pairs of texts with a number ('pair' and 'target') are scored by spearman")
        elif any(source.input is not None or source.conversation is not None for source in sources):
            if self.metric == "accuracy":
                raise ValueError("text with answers is scored by exact_match or spearman; 'accuracy' is for classes")
            if self.model_fields_set & {"classes", "templates"}:
                raise ValueError("'classes' and 'templates' name the classes of pictures; remove them from a text task")
        return self

    def source(self, split: str) -> Source | None:
        """Return the source of `split`, one of `SPLITS`; None if the suite file has none."""
        if split not in SPLITS:
            raise InputError(f"no split '{split}', only {', '.join(SPLITS)}.{did_you_mean(split, SPLITS)}")
        source: Source | None = getattr(self, split)
        return source


class Suite(Strict):
    """A validated suite file. `root` is the folder that its relative paths start from.

    >>> import copy, featcal, torch, transformers
    >>> sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    >>> base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2))
    >>> experts = {task: copy.deepcopy(base) for task in ("a", "b")}
    >>> trained = [torch.nn.init.normal_(one.model.layers[0].mlp.down_proj.weight) for one in experts.values()]
    >>> tokens = torch.arange(32).reshape(4, 8)
    >>> suite = featcal.Suite.of(base=base, experts=experts, samples={"a": tokens, "b": tokens})
    >>> featcal.calibrate(suite).record["tasks"]["a"]["tokens"]
    32
    """

    name: Annotated[str, Field(min_length=1)]
    """Name in tables, records and cards."""
    description: str = ""
    """A sentence about it, for lists of suites."""
    base: Reference | None
    """The model that all experts were fine-tuned from; `null` if it is unknown and the merged model is given: then rho
    is 1, and features that start from a base are refused."""
    merged: Reference | MergeRecipe
    """The merged model, or the method that makes it from the experts."""
    tasks: Annotated[dict[str, Task], Field(min_length=1)]
    """Tasks by name."""
    calibration: CalibrationDefaults = CalibrationDefaults()
    """Options that replace a calibration's own defaults for this suite."""
    vocabulary: Literal["exact", "base"] = "exact"
    """`base` drops the rows of an expert's embeddings that go beyond the base's vocabulary."""
    text_tower: Literal["base", "own"] = "base"
    """For a text tower beside one for pictures: `own` merges and calibrates it too, on prompts of the tasks' classes,
    and scores every model through its own; `base` keeps the base's for all models."""
    _root: Path = PrivateAttr(default=Path())
    _file_name: str = PrivateAttr(default="")
    _held: tuple[Any, ...] = PrivateAttr(default=())
    """Objects behind references to memory, kept alive as long as the suite."""

    @classmethod
    def of(
        cls,
        *,
        base: Any,
        experts: Mapping[str, Any],
        merged: Any = "task-arithmetic",
        samples: Mapping[str, Any] | None = None,
        test: Mapping[str, Any] | None = None,
        classes: Mapping[str, Sequence[str]] | None = None,
        **options: Unpack[SuiteOptions],
    ) -> Suite:
        """Return the suite of some models and samples, without a file.

        A model is a `PreTrainedModel` in memory, whose tensors are used in place and not copied, a folder or an id on
        the Hub. Do not change objects in memory while the suite is in use.

        Args:
            base: the model that the experts were fine-tuned from; None if it is unknown, and then `merged` is a model.
                In memory it (or `merged` in its place) needs `tokenizer` or `processor` for samples that are not
                prepared yet.
            experts: task → model.
            merged: a model, or a merge recipe: "ties:scale=0.4,density=0.3", or a mapping as in a suite file.
            samples: task → calibration samples, which need no labels: pictures (a list of Pillow's, uint8 arrays `[n,
                H, W, 3]`), prepared pictures `[n, 3, H, W]` or token ids `[n, T]` as arrays or tensors, what a
                tokenizer returned, a data set of `datasets`, a table of pandas, a list of texts, of pairs (text,
                answer) or (picture, class), or of rows, a tuple (samples, labels), a path, or a source as a mapping.
            test: task → samples to score models on, in the same forms; they need labels or answers.
            classes: task → names of its classes in the order of the labels.
            options: `SuiteOptions`.

        Raises:
            InputError: objects of another kind, or a problem for which `load_suite` would refuse a file.
        """
        from featcal.suite.objects import WHERE, describe_objects

        content, held = describe_objects({
            "base": base, "experts": experts, "merged": merged, "samples": samples, "test": test, "classes": classes,
            **options,
        })  # fmt: skip
        suite = suite_from_dict(content, Path.cwd(), WHERE)
        suite._held = held
        return suite

    @model_validator(mode="after")
    def _names_are_not_those_of_tables(self) -> Suite:
        if "average" in self.tasks:
            raise ValueError("a task cannot be called 'average', which is the mean over tasks everywhere; rename it")
        if not all(name.strip() for name in self.tasks):
            raise ValueError("a task has no name; give it one")
        if ALL in self.tasks and self.calibration.explicit_options().get("tasks") is not None:
            raise ValueError(
                f"calibration.tasks: '{ALL}' would mean both one task and all tasks; rename the task '{ALL}'"
            )
        return self

    @model_validator(mode="after")
    def _recipe_has_a_base(self) -> Suite:
        if self.base is None and isinstance(self.merged, MergeRecipe):
            raise ValueError(
                "base is null, but a merge by recipe needs a base: name the base, or give a model's folder under merged"
            )
        return self

    @model_validator(mode="after")
    def _recipe_is_for_these_tasks(self) -> Suite:
        problems = self.merged.misfits(self.tasks) if isinstance(self.merged, MergeRecipe) else []
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def root(self) -> Path:
        return self._root

    @property
    def file_name(self) -> str:
        """Return the name of the suite file, without its folder, or that of a recipe of mergekit which was merged
        without one; "" if the suite has no file."""
        return self._file_name

    @property
    def origin(self) -> str:
        """Return the reference of the model that gives the shared files, such as tokenizer and heads; that is the base,
        or the merged model if the base is not known."""
        return str(self.merged) if self.base is None else self.base

    @property
    def origin_role(self) -> str:
        """Return the role of the model behind `origin`."""
        return "merged" if self.base is None else "base"

    @property
    def origin_words(self) -> str:
        """Return the words for the model behind `origin` in sentences; the first expert's if it stands for the merged
        model."""
        if self.base is not None:
            return "the base"
        own = [name for name, task in self.tasks.items() if task.expert == self.merged]
        return f"the expert '{own[0]}'" if own else "the merged model"

    def task(self, name: str) -> Task:
        """Return the task called `name`; raise InputError with a suggestion if there is none."""
        if name not in self.tasks:
            raise InputError(f"suite '{self.name}' has no task '{name}'.{did_you_mean(name, self.tasks)}")
        return self.tasks[name]

    def splits(self) -> tuple[str, ...]:
        """Return the splits that every task has, in the order calibration, validation, test."""
        return tuple(s for s in SPLITS if all(task.source(s) for task in self.tasks.values()))

    def has_written(self, split: str) -> bool:
        """Say whether experts write a task's samples of a split themselves, which nothing is scored on."""
        sources = (task.source(split) for task in self.tasks.values())
        return any(one is not None and one.self_generated is not None for one in sources)

    @property
    def measured_split(self) -> str:
        """Return the default split to measure on: "validation" if every task has it, else "calibration"."""
        # Validation samples are those that calibration never sees.
        return "validation" if "validation" in self.splits() else "calibration"

    @property
    def scored_split(self) -> str:
        """Return the default split to score on: "test" if every task has it, else `measured_split`."""
        return "test" if "test" in self.splits() else self.measured_split

    def unpinned_data(self) -> tuple[str, ...]:
        """Return the Hub data sets without a revision, whose content may change."""
        sources = [source for task in self.tasks.values() for split in SPLITS if (source := task.source(split))]
        ids = [str(source.hub) for source in sources if source.is_unpinned]
        return tuple(dict.fromkeys(one for one in ids if not local_path(one, self.root, "hub").is_dir()))


def load_suite(name_or_path: str | Path) -> Suite:
    """Read an embedded or ready suite by name, or a suite file by path.

    Raises:
        InputError: unknown name, unreadable or invalid YAML, unknown or missing keys (all of them at once).

    >>> import featcal
    >>> suite = featcal.load_suite("lm-mini")
    >>> suite.name, list(suite.tasks)
    ('lm-mini', ['sentiment', 'entailment', 'correct', 'rewrite'])
    """
    file = suite_file(name_or_path)
    content = read_yaml(file)
    if not isinstance(content, dict) or len(_OWN_KEYS & content.keys()) < 2:
        raise InputError(f"{file} is not a suite file, which is a mapping with {', '.join(sorted(_OWN_KEYS))}")
    return suite_from_dict(content, file.resolve().parent, str(file), file.name)


def suite_file(reference: str | Path) -> Path:
    """Return the file of an embedded or ready suite by name, else the suite file at a path or in that folder.

    Raises:
        InputError: there is none; on a shared server, also for files outside its folders.
    """
    embedded, ready = embedded_suites(), ready_suites()
    known = {**ready, **embedded}.get(str(reference))
    try:
        file = known or expand_home(reference)
        if known is None:
            require_inside(file, "suite")
        file = file / "suite.yaml" if file.is_dir() else file
        if file.is_file():
            return file
    except (OSError, RuntimeError, ValueError):  # not even a possible path: too long, an unknown user, a null character
        pass
    raise InputError(
        f"no suite '{shorten(str(reference), 200)}': neither a file nor an embedded suite "
        f"({', '.join(embedded) or 'none'}) nor one of those for the Hub's models in `featcal suite list`."
        f"{did_you_mean(str(reference), [*embedded, *ready])}"
    )


_MOST_PROBLEMS = 50
"""Most mistakes in a suite file that one message lists."""
_OWN_KEYS = frozenset({"name", "base", "merged", "tasks"})
"""Keys that every suite file has. A file with fewer than two of them is no suite file, and messages quote nothing of
it."""


def suite_from_dict(content: dict[str, Any], root: Path, label: str = "suite", file_name: str = "") -> Suite:
    """Validate the content of a suite file; `root` anchors its relative paths, `label` names it in errors, `file_name`
    in records.

    A task with `use: NAME` starts from that entry of the task catalogue; its own keys override the entry's.

    Raises:
        InputError: listing what is wrong with it.
    """
    try:
        suite = Suite.model_validate(_with_catalogue(content, label))
    except ValidationError as error:
        found = _without_noise(error.errors(include_context=False, include_input=False, include_url=False))
        problems = "\n".join(f"  {_place(e['loc'])}: {_explain(e)}" for e in found[:_MOST_PROBLEMS])
        problems += f"\n  and {len(found) - _MOST_PROBLEMS} more" if len(found) > _MOST_PROBLEMS else ""
        raise InputError(f"{label}: not a valid suite\n{problems}") from error
    suite._root, suite._file_name = root, file_name
    return suite


def _with_catalogue(content: dict[str, Any], label: str) -> dict[str, Any]:
    tasks = content.get("tasks")
    if not isinstance(tasks, dict):
        return content
    used = {n: str(t["use"]) for n, t in tasks.items() if isinstance(t, dict) and "use" in t}
    if not used:
        return content
    catalogue = task_catalogue()
    unknown = [(name, entry) for name, entry in used.items() if entry not in catalogue]
    if unknown:
        raise InputError(
            *(
                f"{label}: tasks.{name}.use: no task '{entry}' in the catalogue.{did_you_mean(entry, catalogue)}"
                for name, entry in unknown
            )
        )
    own = {name: {key: value for key, value in tasks[name].items() if key != "use"} for name in used}
    return {**content, "tasks": {**tasks, **{name: {**catalogue[used[name]], **own[name]} for name in used}}}


@cache
def task_catalogue() -> dict[str, dict[str, Any]]:
    """Return tasks of published benchmarks by name: sources, class names, templates and metric, without an expert."""
    return {name: task for file in task_files() for name, task in read_yaml(file).items()}


def _without_noise(found: Sequence[Any]) -> list[Any]:
    """Drop the error that a recipe is not a text if another error explains what is wrong with the recipe."""
    places = [_place(e["loc"]) for e in found if e["type"] not in ("string_type", "model_type")]
    return [e for e in found if e["type"] != "string_type" or not any(p.startswith(_place(e["loc"])) for p in places)]


def _place(loc: tuple[int | str, ...]) -> str:
    skip = {"MergeRecipe", "constrained-str"}
    parts = [shorten(str(part), 60) for part in loc if str(part) not in skip and "[" not in str(part)]
    return ".".join(parts) or "(top level)"


def _explain(error: Any) -> str:
    if error["type"] == "extra_forbidden":
        return f"unknown key.{did_you_mean(str(error['loc'][-1]), _keys_at(error['loc']))}"
    return str(error["msg"]).removeprefix("Value error, ")


def _keys_at(loc: tuple[int | str, ...]) -> list[str]:
    """Return the keys that a suite file may have in the place of an unknown one."""
    models: dict[str, type[BaseModel]] = {"calibration": CalibrationDefaults, "tasks": Task}
    model = models.get(str(loc[0]), Suite) if len(loc) > 1 else Suite
    if model is Task and len(loc) > 3:
        model = Source
    return [*model.model_fields, "use"] if model is Task else list(model.model_fields)


def references(suite: Suite) -> dict[str, str]:
    """Return the reference of every model of a suite by its role, first the one that gives the shared files; merge
    recipes and unknown bases have no reference."""
    merged = {} if isinstance(suite.merged, MergeRecipe) else {"merged": suite.merged}
    experts = {expert_role(task): spec.expert for task, spec in suite.tasks.items()}
    return {suite.origin_role: suite.origin, **merged, **experts}


def expert_role(task: str) -> str:
    """Return the role of a task's expert, which messages use as its name too."""
    return f"expert '{task}'"
