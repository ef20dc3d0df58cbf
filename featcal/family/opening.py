"""Open a suite: its adapter and its models as sources of tensors. Headers are read, weights are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from featcal.family.differences import list_differences
from featcal.formats.contents import inputs_digest
from featcal.formats.conversions import untie_base
from featcal.formats.locate import locate
from featcal.formats.located_model import Located, explain_model_errors
from featcal.formats.lora import LoraWeights
from featcal.formats.model_files import Commit, model_commits
from featcal.formats.sentences import TEXT, SentenceText
from featcal.formats.weights import FirstRows, Overlay, UnknownBase, Weights
from featcal.mergers.common.engine import RecipeWeights
from featcal.models.activations import ActivationStore
from featcal.models.adapter import Adapter, Batch
from featcal.models.compute import DTYPES, Compute, compute_for
from featcal.models.context import Run
from featcal.models.families.language import IGNORED
from featcal.models.families.registry import adapter_for
from featcal.models.generation import Generator
from featcal.models.lane import ExpertPass, WalkCache
from featcal.models.model import own_head, tasks_with_own_modules
from featcal.models.replay import check_replay
from featcal.samples.generated_texts import prompt_ids, write_pool
from featcal.samples.pool import Pool
from featcal.samples.prepare import Preparation
from featcal.samples.prompts import class_prompts, prompt_positions
from featcal.samples.sources import Samples, count_as, draw_samples, preview_samples
from featcal.suite.recipe import MergeRecipe
from featcal.suite.schema import Suite
from featcal.system.errors import InputError
from featcal.system.formatting import some
from featcal.system.progress import Progress, silent

Given = TypeVar("Given")
Made = TypeVar("Made")
TINY = 8 * 2**20
"""Bytes of models up to which a second core hardly speeds up their products."""
WASTED = 0.25
"""Share of padding tokens above which texts are sorted by length if their order does not matter."""
FEW = 16
"""Most texts in a batch that is sorted because of padding."""
WITHOUT_BASE = (
    "the base is not known: a calibration pulls to the merged model itself (rho 1) and has no prior, and there are no "
    "task vectors, no other merges and no scores of the base; name it in the suite file ('base: REFERENCE')"
)
"""Note on a suite without a base."""
PART = 2048
"""Pictures that are prepared together when a whole split is scored."""


@runtime_checkable
class Calibrated(Protocol):
    """Any object with calibrated weights, such as `CalibrationResult`."""

    @property
    def weights(self) -> Weights: ...


@dataclass(frozen=True)
class Family:
    """Base, merged model and experts of a suite, ready to be read.

    >>> import featcal
    >>> family = featcal.open_family(featcal.load_suite("lm-mini"))
    >>> name = "model.layers.0.mlp.down_proj.weight"
    >>> tuple(family.experts["sentiment"].read([name])[name].shape)
    (96, 192)
    """

    suite: Suite
    adapter: Adapter
    compute: Compute
    base: Weights
    merged: Weights
    experts: Mapping[str, Weights]
    origin: Located
    """Place of the base, which gives tokenizer, image processor and text tower; of the merged model if the base is not
    known."""
    container: Located
    """Model whose layout and non-weight files an exported model gets: the merged model, else the base."""
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Class names in the experts' own configurations, by task; tasks without names are left out."""
    merged_name: str = "merged"
    """Name of the model to calibrate: "merged" for the suite's, else that of its replacement."""
    commits: tuple[Commit, ...] = ()
    """Commits of the suite's models on the Hub at the time of opening."""
    _written: dict[tuple[str, torch.dtype], Pool] = field(default_factory=dict, repr=False, compare=False)
    """Texts that experts wrote, kept as long as a copy of this family exists."""

    @property
    def stored_bytes(self) -> int:
        """Return the size of the merged model's tensors."""
        return sum(one.nbytes for one in self.merged.info.values())

    @property
    def is_tiny(self) -> bool:
        """Say whether the models are so small that a second core hardly makes their products faster."""
        return self.stored_bytes <= TINY

    @property
    def base_folder(self) -> Path:
        """Return the folder of the base's tokenizer, image processor and text tower."""
        return self.origin.folder

    @property
    def is_base_known(self) -> bool:
        """Say whether the base is known."""
        return not isinstance(self.base, UnknownBase)

    def model(self, name: str | Weights | Calibrated) -> Weights:
        """Return a model by its name: "base", "merged", a checkpoint in a folder or on the Hub, or a calibration's.

        Raises:
            InputError: no such model, or one that does not fit the suite; the message lists every difference.
        """
        if isinstance(name, Calibrated):
            return name.weights
        if not isinstance(name, str):
            return name
        if name in ("base", "merged"):
            return self.base if name == "base" else self.merged
        return self.checkpoint(name)[1]

    def checkpoint(self, ref: str) -> tuple[Located, Weights]:
        """Return a checkpoint in a folder or on the Hub, found and opened.

        Raises:
            InputError: there is none, or it does not fit the suite; the message lists every difference.
        """
        located = locate(ref, Path.cwd(), f"model '{ref}'", unpack=True)
        return located, open_model(located, self.adapter, self.compute.device, self.suite)

    def merge(self, recipe: MergeRecipe) -> RecipeWeights:
        """Merge the experts by a recipe, independent of the suite's own."""
        return _recipe_weights(recipe, self.base, self.experts, self.adapter)

    def with_merged(self, merged: Weights, name: str) -> Family:
        """Return the suite with another model, of this name, instead of the merged one."""
        # Only weights are known of the model, so files and layout come from the base.
        return replace(self, merged=merged, merged_name=name, container=self.origin)

    def samples(
        self, task: str, split: str, count: int | None, seed: int, part: slice = slice(None), copies: int = 0
    ) -> Samples:
        """Draw `count` samples of a task's split (all with None) by (seed, task name), and return a part of them.

        Args:
            copies: number of augmented copies of every picture, which follow all pictures (`samples.vary`).

        Raises:
            InputError: no such split, samples that cannot be read, or inputs that the model does not take.
        """
        drawn = draw_samples(self.suite, task, split, count, seed, replace(self._preparation(), copies=copies), part)
        if self.adapter.reads_prompts:
            drawn = replace(drawn, inputs={**drawn.inputs, **self._prompts_beside(drawn, part.start or 0)})
        problem = self.adapter.misfit(drawn.inputs)
        if problem is not None:
            raise InputError(f"task '{task}', {split} samples: {problem}")
        return count_as(drawn, self.head_classes(task))

    def _prompts_beside(self, drawn: Samples, start: int) -> dict[str, Tensor]:
        """Return the inputs of the text tower: for every sample one prompt of the task's classes, in turn.

        Args:
            start: number of earlier samples in the draw.
        """
        if drawn.class_names is None:
            raise InputError(
                f"task '{drawn.task}': no class names, from which prompts for the text tower are made; give 'classes' "
                "in "
                "the suite file, or leave 'text_tower' out"
            )
        texts = class_prompts(drawn.class_names, self.suite.task(drawn.task).templates)
        which = prompt_positions(len(texts), range(start, start + len(drawn)), drawn.total)
        return {**self.adapter.prompt_inputs(self.origin, [texts[one] for one in which])}

    def viewable_samples(self, task: str, split: str, count: int | None, seed: int) -> Samples:
        """Return the raw samples of a split, for display; InputError if they cannot be read (`look`)."""
        return count_as(
            preview_samples(self.suite, task, split, count, seed, self.write_texts), self.head_classes(task)
        )

    def head_classes(self, task: str) -> tuple[str, ...]:
        """Return the names of the classes that a task's expert scores, in the order of its head: `LABEL_0` and so on if
        it only numbers them, none without a head."""
        expert = self.experts.get(task)
        if expert is None or self.adapter.scores_with != "own":
            return ()
        own = own_head(expert, task)
        if own is not None:
            return own.classes or ()
        last = next((f"{name}.weight" for name in reversed(self.adapter.classifier)), "")
        rows = expert.info[last].shape[0] if last in expert.info else 0
        names = self.classes.get(task, ())
        return names if len(names) == rows else tuple(f"LABEL_{row}" for row in range(rows))

    def prompts(self, task: str, split: str) -> list[list[int]]:
        """Return the prompts (token ids) from which a task's expert writes samples; nothing is written yet.

        Raises:
            InputError: prompts that cannot be read.
        """
        spec = self.suite.task(task)
        source = spec.source(split)
        asked = None if source is None else source.self_generated
        return [] if asked is None else prompt_ids(asked, spec, self._preparation())

    def write_texts(self, task: str) -> Pool:
        """Let a task's expert write its calibration text; once, with the whole expert in memory.

        Raises:
            InputError: samples come from elsewhere, prompts cannot be read, or the expert cannot generate.
        """
        spec = self.suite.task(task)
        source = spec.calibration and spec.calibration.self_generated
        if not source:
            raise InputError(f"task '{task}': its calibration samples are not a source of the kind 'self_generated'")
        preparation = self._preparation()
        prompt_ids(source, spec, preparation)
        expert, key = self.experts[task], (task, self.compute.dtype)
        if not self.adapter.generates or tasks_with_own_modules(expert):
            raise InputError(f"{expert.label} cannot generate; take samples from elsewhere")
        if key not in self._written:
            self._written[key] = write_pool(self.generator(expert), source, spec, preparation, task)
        return self._written[key]

    def generator(self, model: Weights) -> Generator:
        """Load a model that generates text, whole in memory, in the compute dtype."""
        return self.adapter.generating(self.compute.place(model.read(self.adapter.tower)), self.base_folder)

    def _preparation(self) -> Preparation:
        adapter = self.adapter
        pictures = self.origin.pictures()
        return Preparation(
            self.base_folder,
            adapter.modality,
            adapter.image_processor,
            pictures,
            self.write_texts,
            sentences=adapter.sentence_text,
            image_token=adapter.image_token,
        )

    def preparation(self) -> dict[str, str]:
        """Name the preprocessing of the calibration samples, for the record of a run; empty for `tensors` alone."""
        sources = [task.calibration for task in self.suite.tasks.values()]
        if all(source is None or source.tensors is not None for source in sources):
            return {}
        return self._preparation().describe_tools()

    def parts(self, task: str, split: str, count: int | None, seed: int) -> Iterator[Samples]:
        """Yield the samples of a split in parts of at most `PART` pictures, or all texts as one part."""
        if self.adapter.modality != "pixels":
            yield self.samples(task, split, count, seed)
            return
        # A whole test split of pictures need not fit into memory.
        part = self.samples(task, split, count, seed, slice(0, PART))
        yield part
        for start in range(PART, part.total, PART):
            yield self.samples(task, split, count, seed, slice(start, start + PART))

    def expert_pass(
        self, samples: Samples, batch_size: int, kept: WalkCache | None = None, in_order: bool = True
    ) -> ExpertPass:
        """Return the expert of the samples' task, ready to walk over them in batches of `batch_size`.

        Args:
            kept: cache for the next walk; without it only one walk is possible.
            in_order: keep the order of the samples; False if only sums over all of them matter, so that texts may be
                sorted by length, in smaller batches.
        """
        task, expert, device = samples.task, self.experts[samples.task], self.compute.device
        batches = batches_of(samples, batch_size, device)
        # Texts are cut to the longest of their batch, and inputs take turns: what was drawn knows of no batches.
        drawn = inputs_digest([samples.inputs]) if len(samples.inputs) > 1 else ""
        one = ExpertPass(
            task, expert, batches, samples.indices, self.compute, kept, samples.truncated, draw_digest=drawn
        )
        if in_order or not _has_much_padding(samples, batch_size):
            return one
        batches, places = batches_by_length(samples, min(FEW, batch_size), device)
        indices = tuple(samples.indices[i] for i in places.argsort().tolist())
        return replace(one, batches=batches, indices=indices)

    def run(self, progress: Progress = silent, store: ActivationStore | None = None) -> Run:
        """Return the resources of a measurement or a calibration of this family; `store` bounds its token states."""
        return Run(
            self.adapter, self.base, self.merged, self.head(), self.compute, progress, store or ActivationStore()
        )

    def head(self) -> dict[str, Tensor]:
        """Read head tensors of the base, or of the merged model if the base is not known, to the compute device; empty
        if there are none."""
        source = self.base if self.is_base_known else self.merged
        return self.compute.place(source.read(name for name in self.adapter.head if name in source.info))

    def resident(self) -> Family:
        """Return the family with all tensors of the computation in memory, in their stored dtype, because interactive
        work reads them many times."""
        names = self.adapter.tower

        def load(weights: Weights, extra: Sequence[str] = ()) -> Overlay:
            return _Resident(weights.label, weights, weights.read([*names, *extra]))

        head = [name for name in self.adapter.head if name in self.base.info]
        return replace(
            self,
            base=load(self.base, head) if self.is_base_known else self.base,
            merged=load(self.merged),
            experts={task: load(expert) for task, expert in self.experts.items()},
        )

    def with_stored_tensors(self) -> Family:
        """Undo `resident`: return the family that reads every tensor from its file when needed."""

        def unwrap(weights: Weights) -> Weights:
            return weights.under if isinstance(weights, _Resident) else weights

        experts = {task: unwrap(expert) for task, expert in self.experts.items()}
        return replace(self, base=unwrap(self.base), merged=unwrap(self.merged), experts=experts)


class _Resident(Overlay):
    """A model with all tensors of its file in memory."""


def _recipe_weights(
    recipe: MergeRecipe, base: Weights, experts: Mapping[str, Weights], adapter: Adapter
) -> RecipeWeights:
    return RecipeWeights(recipe, base, experts, adapter.tower, adapter.vocabulary, adapter.transposed_weights)


def open_family(suite: Suite, device: str = "auto", precision: str = "exact") -> Family:
    """Open every model of a suite and check from their headers that they belong together.

    Raises:
        InputError: lists *all* problems: missing folders, other architectures, missing, extra or misshapen tensors; or
            names the block of an architecture that cannot be run block by block; or the argument is not a suite.

    >>> import featcal
    >>> family = featcal.open_family(featcal.load_suite("lm-mini"))
    >>> family.adapter.family, list(family.experts)
    ('qwen3', ['sentiment', 'entailment', 'correct', 'rewrite'])
    """
    if not isinstance(suite, Suite):
        raise InputError(
            f"suite: a {type(suite).__name__} is not a suite; read one with featcal.load_suite, or make one of your "
            "models and samples with featcal.Suite.of"
        )
    compute = compute_for(device, precision)
    first = suite.origin_role
    found = locate(suite.origin, suite.root, first)
    labels = {f"expert '{task}'": task for task in suite.tasks}
    refs = {first: suite.origin, **{label: suite.tasks[task].expert for label, task in labels.items()}}
    refs |= {} if isinstance(suite.merged, MergeRecipe) else {"merged": suite.merged}
    located, missing = _each(refs, lambda label, ref: found if label == first else locate(ref, suite.root, label))
    with explain_model_errors(first, found.config_source):
        own_text, classifies = suite.text_tower == "own", classify({n: located[n] for n in labels if n in located})
        adapter = adapter_for(found.config, found.names, compute.device, first, own_text, classifies)
        check_replay(adapter, compute.device)
    opened, differing = _each(located, lambda _, one: open_model(one, adapter, compute.device, suite))
    # In the suite's order, whichever step found them: all problems of all models at once.
    report_all([problem for label in refs for problem in (*missing.get(label, ()), *differing.get(label, ()))])
    commits = model_commits(refs.values(), suite.root)
    experts = {task: opened[label] for label, task in labels.items()}
    base = UnknownBase(opened[first]) if suite.base is None else opened[first]
    classes = {task: named_classes(located[label].config) for label, task in labels.items()}
    classes = {task: names for task, names in classes.items() if names and adapter.classifier}
    if isinstance(suite.merged, MergeRecipe):
        recipe = _recipe_weights(suite.merged, base, experts, adapter)
        return Family(suite, adapter, compute, base, recipe, experts, found, found, classes, commits=commits)
    merged = opened["merged"]
    container = found if isinstance(merged, FirstRows) else located["merged"]  # the config says how many rows there are
    return Family(suite, adapter, compute, base, merged, experts, found, container, classes, commits=commits)


def classify(experts: Mapping[str, Located]) -> bool:
    """Say whether the models of a suite have a classifier per task, if their type has language models too: every expert
    has one, and the base may be the language model under them."""
    return bool(experts) and all(one.classifies for one in experts.values())


def _each(
    given: Mapping[str, Given], make: Callable[[str, Given], Made]
) -> tuple[dict[str, Made], dict[str, list[str]]]:
    """Apply a function to every model; return results and problems by label."""
    made: dict[str, Made] = {}
    problems: dict[str, list[str]] = {}
    for label, one in given.items():
        try:
            made[label] = make(label, one)
        except InputError as error:
            problems[label] = list(error.problems)
    return made, problems


def named_classes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the class names of a `config.json` in the order of the scores; none if it only numbers them."""
    stated = config.get("id2label")
    if not isinstance(stated, Mapping) or {str(key) for key in stated} != {str(i) for i in range(len(stated))}:
        return ()
    names = tuple(str(stated[key]) for key in sorted(stated, key=int))
    return () if names == tuple(f"LABEL_{i}" for i in range(len(names))) else names


def ensure_family(suite: Suite | Family, device: str = "auto", precision: str | None = None) -> Family:
    """Open a suite with the given options; an open one stays on its device, and gets the precision if one is given."""
    if not isinstance(suite, Family):
        return open_family(suite, device, precision or "exact")
    # References compute in float64 and keep doing so.
    if precision is None or suite.compute.dtype is torch.float64:
        return suite
    return replace(suite, compute=Compute(suite.compute.device, DTYPES[precision]))


def open_model(located: Located, adapter: Adapter, device: torch.device, suite: Suite | None = None) -> Weights:
    """Open a model of the adapter's architecture.

    Args:
        suite: decides whether extra rows of the vocabulary are dropped, and where texts are cut.

    Raises:
        InputError: listing every difference.
    """
    stored = located.open(adapter.canonical, adapter.aliases)
    weights: Weights = stored
    if suite is not None and suite.vocabulary == "base":
        rows = {name: adapter.shapes()[name][0] for name in adapter.vocabulary}
        longer = {n: r for n, r in rows.items() if n in stored.info and stored.info[n].shape[0] > r}
        weights = FirstRows(stored, longer) if longer else stored
    problems = list_differences(adapter, weights, located.config)
    if not problems:
        with explain_model_errors(located.label, located.config_source):
            own_text = adapter.reads_prompts
            theirs = adapter_for(located.config, located.names, device, located.label, own_text).settings
        problems = [
            f"{located.label}: {name} is {theirs[name]!r} in {located.config_source}, the base has {value!r}"
            for name, value in adapter.settings.items()
            if theirs[name] != value
        ]
    problems += _other_texts(located, adapter, suite)
    problems += _check_orientation(stored, adapter) if isinstance(stored, LoraWeights) else []
    remedy = "" if located.label == "base" else untie_base(adapter.aliases)
    problems += [
        f"{located.label}: '{repeated}' must repeat '{name}' but holds other values ({located.folder})"
        f"{remedy and f'; {remedy}'}"
        for repeated, name in adapter.aliases.items()
        if repeated in stored.leftovers and name in stored.info and not stored.repeats(repeated, name)
    ]
    # Sentences say "the base" of what every model is held against.
    report_all([one.replace("the base", suite.origin_words) for one in problems] if suite is not None else problems)
    return weights


def _other_texts(located: Located, adapter: Adapter, suite: Suite | None) -> list[str]:
    """Return problems of a sentence-transformers model that prepares texts differently from the base."""
    if adapter.sentence_text is None or TEXT not in located.config:
        return []
    says_length = suite is not None and all(task.says_length for task in suite.tasks.values())
    own, theirs = adapter.sentence_text, SentenceText(**located.config[TEXT])
    remedy = "all models read the same texts, so let their files say the same"
    remedy = f"{remedy} (for the length, 'max_length' of every task says it too)"
    return [f"{located.label}: {one} ({located.folder}); {remedy}" for one in own.differences(theirs, says_length)]


def _check_orientation(model: LoraWeights, adapter: Adapter) -> list[str]:
    """Return a problem where a LoRA's factors are meant for weights that are stored the other way round."""
    maps = {f"{block.stored_name(name)}.weight" for block in adapter.blocks() for name in block.maps}
    wrong = [name for name in model.transposed_names(maps) if name not in adapter.transposed_weights]
    wrong += [
        name for name in adapter.transposed_weights & model.changes.keys() if name not in model.transposed_names(maps)
    ]
    if not wrong:
        return []
    value = "true" if adapter.transposed_weights else "false"
    return [f"{model.label}: fan_in_fan_out in adapter_config.json must be {value} for {some(sorted(wrong))}"]


def report_all(problems: Sequence[str]) -> None:
    """Raise one InputError that lists every problem; nothing if there is none."""
    if problems:
        raise InputError(*problems)


def batches_of(samples: Samples, size: int, device: torch.device) -> list[Batch]:
    """Cut model inputs into batches of `size`, on the device; text loses the padding that a batch shares."""
    return [
        _trim({name: tensor[start : start + size] for name, tensor in samples.inputs.items()}, device)
        for start in range(0, len(samples), size)
    ]


def batches_by_length(samples: Samples, size: int, device: torch.device) -> tuple[list[Batch], Tensor]:
    """Cut text into batches of `size` with the longest first, so that little of a batch is padding.

    Returns:
        The batches, and the row in all of them of every sample, `[n]` int64; pictures stay in their order.
    """
    if "attention_mask" not in samples.inputs:
        return batches_of(samples, size, device), torch.arange(len(samples))
    order = samples.inputs["attention_mask"].sum(1).argsort(descending=True, stable=True)
    batches = [{name: tensor[rows] for name, tensor in samples.inputs.items()} for rows in torch.split(order, size)]
    return [_trim(batch, device) for batch in batches], order.argsort()


def _has_much_padding(samples: Samples, size: int) -> bool:
    """Say whether batches of `size` in the order of the samples have more padding than `WASTED` allows."""
    if "attention_mask" not in samples.inputs or "pixel_values" in samples.inputs:
        return False  # what counts of pictures is not the text beside them
    lengths = samples.inputs["attention_mask"].sum(1)
    padded = sum(int(some.max()) * len(some) for some in torch.split(lengths, size))
    return padded > (1 + WASTED) * int(lengths.sum())


def _trim(batch: Batch, device: torch.device) -> Batch:
    longest = {}
    if "attention_mask" in batch:
        tokens = int(batch["attention_mask"].sum(1).max())
        longest = dict.fromkeys(("input_ids", "attention_mask", "completion_mask", "token_type_ids"), tokens)
    if "labels" in batch:
        longest["labels"] = int((batch["labels"] != IGNORED).sum(1).max())
    cut = {name: tensor[:, : longest[name]] if name in longest else tensor for name, tensor in batch.items()}
    # Cut before the copy to the device: padding is not worth its transfer.
    return {name: tensor.contiguous().to(device) for name, tensor in cut.items()}
