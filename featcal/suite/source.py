"""Read the source of one split in a suite file."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from featcal.suite.strict import Strict
from featcal.suite.template import template_fields
from featcal.system.in_memory import is_held

_COLUMNS = ("image", "label", "input", "pair", "target", "targets", "conversation")
OPTIONS_OF_KIND: dict[str, tuple[str, ...]] = {
    "embedded": ("split",),
    "tensors": ("key", "labels", "mask"),
    "arrays": ("split",),
    "imagefolder": ("label",),
    "parquet": ("split", *_COLUMNS),
    "jsonl": ("split", *_COLUMNS),
    "rows": _COLUMNS,
    "hub": ("config", "split", "revision", *_COLUMNS),
    "self_generated": (),
}
"""Options of every kind of source; all of them also take `limit`, and those of pictures `corruption`."""
SOURCE_KINDS = tuple(kind for kind in OPTIONS_OF_KIND if kind != "rows")
"""Kinds that a suite file can name."""
ENDINGS = {".jsonl": "jsonl", ".jsonl.gz": "jsonl", ".parquet": "parquet", ".npz": "arrays"}
"""Kinds of source by the ending of their files."""
WRITTEN = "texts that experts wrote have no right answers"
"""Reason why samples of the kind `self_generated` are not scored."""
TURNS = ("messages", "conversations", "conversation")
"""Columns that usually hold the turns of a conversation."""

Kind = Literal["gaussian-noise", "motion-blur", "fog"]
CORRUPTIONS: tuple[str, ...] = get_args(Kind)


Prompt = Annotated[str, Field(min_length=1)]
Column = Annotated[str, Field(min_length=1)]


class Corruption(Strict):
    """A corruption of pictures, applied before anything else."""

    kind: Kind
    """Kind of the corruption."""
    severity: Annotated[int, Field(ge=1, le=5)] = 3
    """Strength, from 1 to 5."""


class SelfGenerated(Strict):
    """Text that the task's expert writes itself."""

    prompts: Annotated[int, Field(gt=0)] | Annotated[tuple[Prompt, ...], Field(min_length=1)]
    """Beginnings, one text for each; or a number of texts, each from the start token."""
    tokens: Annotated[int, Field(gt=0)]
    """New tokens at most."""

    @property
    def count(self) -> int:
        """Return the number of texts."""
        return self.prompts if isinstance(self.prompts, int) else len(self.prompts)

    @property
    def description(self) -> str:
        """Describe in words how the texts were generated."""
        begun = "its start token" if isinstance(self.prompts, int) else "given prompts"
        return f"{self.count} texts that the task's expert wrote from {begun}, at most {self.tokens} new tokens each"


class Source(Strict):
    """The place of the samples of one split; exactly one of the kinds is given.

    A source with `input` or `conversation`, and texts that experts write, are text; any other source is pictures
    (`tensors` may be either). Text with `image` has a picture per row, for models that read both.
    """

    embedded: str | None = None
    """Name of a task whose samples featcal generates."""
    tensors: str | None = None
    """safetensors file; `key` names preprocessed pictures `[n, 3, H, W]` or token ids `[n, T]` (int64)."""
    arrays: str | None = None
    """`.npz` with `train_x`, `train_y`, `test_x`, `test_y` (uint8 `[n, H, W, 3]`, int) and `class_names`."""
    imagefolder: str | None = None
    """Folder with one sub-folder of images per class, or with a `metadata.csv`, `.jsonl` or `.parquet` that
    gives every `file_name` its label."""
    parquet: str | None = None
    """Parquet file, or folder of them."""
    jsonl: str | None = None
    """One JSON object per line; `.gz` is unpacked on the way."""
    hub: str | None = None
    """Id of a data set on the Hub, or a local folder in the same layout; needs the package `datasets`."""
    rows: str | None = None
    """Samples in memory with named columns, by the reference that `Suite.of` gives them; `tensors` may be one too."""
    self_generated: SelfGenerated | None = None
    """No data: texts that the task's expert writes; only for calibration."""

    key: str | None = None
    """Name of the tensor in the file of `tensors`."""
    labels: str | None = None
    """Tensor of class indices `[n]`, or for token ids of target token ids `[n, U]` with -100 as padding."""
    mask: str | None = None
    """Tensor `[n, T]`, 1 on tokens and 0 on padding; needed where there is padding."""
    split: str | None = None
    """Split of the source, by its own name."""
    config: str | None = None
    """Configuration of a Hub data set."""
    revision: str | None = None
    """Commit or tag of a Hub data set; without one the data may change under the suite."""

    image: str | None = None
    """Column of pictures, "image" by default; together with `input` the pictures that belong to the texts. JSON Lines
    hold file names, relative to the folder of the file."""
    label: str | None = None
    """Column of class indices or class names, "label" by default. For text it names the classes of a classifier, or the
    key into `targets`."""
    input: str | None = None
    """Template of the model's input over the columns, for example `Is '{sentence}' positive or negative?`."""
    pair: str | None = None
    """Template of the second text, for a classifier that reads two: `input: "{premise}"`, `pair: "{hypothesis}"`. With
    `target`, a number, it is a text of its own, whose embedding is compared with that of `input` (folders of
    sentence-transformers)."""
    target: str | None = None
    """Template of the right answer."""
    targets: tuple[str, ...] | dict[int | str, str] | None = None
    """The right answer for every value of the column `label`, as a list by class index or as a mapping."""
    conversation: Column | Annotated[tuple[Column, ...], Field(min_length=1)] | None = None
    """Replaces `input` and `target`: the column with the turns of a conversation (`messages`, `conversations`), or
    several columns whose turns and texts follow each other (`[prompt, completion]`, `[instruction, input, output]`).
    The base's chat template writes the text; the assistant's last turn is the right answer."""
    limit: Annotated[int, Field(gt=0)] | None = None
    """Use only so many samples of the source, evenly spread over it."""
    corruption: Corruption | None = None
    """Corruption of raw pictures, to measure robustness."""

    @field_validator("targets", mode="before")
    @classmethod
    def _no_yaml_booleans(cls, targets: Any) -> Any:
        words = [*targets, *targets.values()] if isinstance(targets, dict) else targets or []
        if isinstance(words, list) and any(isinstance(word, bool) for word in words):
            raise ValueError("put words such as 'yes' and 'no' in quotes: bare, YAML reads them as true and false")
        return targets

    @field_validator("input", "pair", "target")
    @classmethod
    def _readable_template(cls, template: str | None) -> str | None:
        if template is not None and not template_fields(template):
            raise ValueError(f"'{template}' names no field; write the name of a column between braces")
        return template

    @model_validator(mode="after")
    def _one_kind_with_its_options(self) -> Source:
        kinds = [kind for kind in OPTIONS_OF_KIND if getattr(self, kind) is not None]
        if len(kinds) != 1:
            raise ValueError(f"give exactly one of {', '.join(SOURCE_KINDS)} (found {', '.join(kinds) or 'none'})")
        options = {option for allowed in OPTIONS_OF_KIND.values() for option in allowed}
        misplaced = {option for option in options if getattr(self, option) is not None} - set(OPTIONS_OF_KIND[kinds[0]])
        if misplaced:
            raise ValueError(
                f"{', '.join(sorted(misplaced))} {'is not an option' if len(misplaced) == 1 else 'are not options'} of "
                "a source "
                f"of kind '{kinds[0]}', which takes {', '.join(OPTIONS_OF_KIND[kinds[0]])} and limit"
            )
        if self.tensors is not None and self.key is None:
            raise ValueError("a 'tensors' source needs 'key', the name of the tensor in the file")
        if self.hub is not None and self.split is None:
            raise ValueError("a 'hub' source needs 'split', one of the data set's own splits")
        if self.rows is not None and not is_held(self.rows):
            raise ValueError(
                "'rows' are samples in memory, which no file can name; give one of " + ", ".join(SOURCE_KINDS)
            )
        if self.jsonl is not None and self.input is None and self.conversation is None:
            raise ValueError(
                "a 'jsonl' source needs 'input', the template of the model's input, or 'conversation', a column of "
                "turns"
            )
        return self

    @model_validator(mode="after")
    def _pictures_or_text(self) -> Source:
        beside = [name for name in _COLUMNS if name != "conversation" and getattr(self, name) is not None]
        if self.conversation is not None and beside:
            raise ValueError(f"'conversation' gives input and answer itself; leave out {', '.join(beside)}")
        if self.input is None and (self.target is not None or self.targets is not None):
            raise ValueError("'target' and 'targets' belong to text; give 'input', the template of the model's input")
        if self.image is not None and self.label is not None and self.input is not None and self.targets is None:
            raise ValueError("a text with a picture needs an answer in words; give 'target' or 'targets'")
        if self.target is not None and self.targets is not None:
            raise ValueError("give 'target' (a template) or 'targets' (an answer for every label), not both")
        if self.target is not None and self.label is not None:
            raise ValueError("give 'target' (the answer as text) or 'label' (its class, for a classifier), not both")
        if self.pair is not None and (self.input is None or self.targets is not None):
            raise ValueError(
                "'pair' is the second text for a classifier (with 'label'), or one to compare (with 'target', a "
                "number): it needs 'input' and excludes 'targets'"
            )
        return self

    @model_validator(mode="after")
    def _only_pictures_are_corrupted(self) -> Source:
        if self.corruption is not None and not self.pictures:
            raise ValueError("'corruption' needs raw pictures, not text or preprocessed tensors")
        return self

    @property
    def pictures(self) -> bool:
        """Say whether the source holds raw pictures, as far as the suite file shows."""
        return not any((self.tensors, self.jsonl, self.input, self.conversation, self.self_generated))

    @property
    def turn_columns(self) -> tuple[str, ...]:
        """Return the columns of a conversation, in their order; none for other samples."""
        return (self.conversation,) if isinstance(self.conversation, str) else self.conversation or ()

    @property
    def has_classes(self) -> bool:
        """Say whether the source holds texts with classes for a classifier, rather than with answers in words."""
        return self.input is not None and self.label is not None and self.targets is None

    @property
    def has_pairs(self) -> bool:
        """Say whether the source holds pairs of texts with a number for their similarity."""
        return self.pair is not None and self.target is not None

    @property
    def kind(self) -> str:
        return next(kind for kind in OPTIONS_OF_KIND if getattr(self, kind) is not None)

    @property
    def is_unpinned(self) -> bool:
        """Say whether the source is a Hub data set without a revision, whose samples may change."""
        return self.hub is not None and self.revision is None
