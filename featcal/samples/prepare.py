"""Prepare examples as model inputs: pixels for vision towers, token ids for encoder-decoders, decoders and encoders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from featcal.formats.checkpoint import read_config
from featcal.formats.in_memory import name_place
from featcal.formats.located_model import PicturePreprocessing
from featcal.formats.model_files import settings_files
from featcal.formats.processor import PREPROCESSOR_FILE, PROCESSOR_FILE, image_processor_settings, timm_settings
from featcal.formats.sentences import SentenceText, read_in_lower_case, reads_lower_case
from featcal.formats.tokenizers import open_tokenizer
from featcal.models.families.language import IGNORED
from featcal.samples.pool import Image, Pool, TextExample
from featcal.system.errors import InputError
from featcal.system.extras import require_packages
from featcal.system.fingerprints import FileStamp, stamps

Modality = Literal["pixels", "seq2seq", "causal", "text"]
"""Kind of samples: pictures, separate input and answer, one continuing text, or texts and pairs of them."""
Written = Callable[[str], Pool]
"""Function that returns the texts of a task's expert."""
BACKEND = "torchvision"
"""Library that resizes pictures: Pillow's rounding differs by a grey level in some pixels in a hundred."""
PROCESSORS = ("CLIPImageProcessor", "ViTImageProcessor", "BitImageProcessor", "SiglipImageProcessor")
"""Image processors of transformers that a base's settings may name."""


@dataclass(frozen=True)
class Prepared:
    """Keyword inputs of a model, and the number of examples that were truncated for it."""

    inputs: Mapping[str, Tensor]
    truncated: int = 0


@dataclass(frozen=True)
class Preparation:
    """The tools that turn samples into a model's inputs."""

    folder: Path
    """Folder of the base, with its image processor or tokenizer."""
    modality: Modality
    image_processor: str = ""
    """Class of transformers that turns pictures into pixels by `folder`'s settings; empty for the one they name."""
    pictures: PicturePreprocessing | None = None
    """Replaces the image processor, if given."""
    written: Written | None = None
    """Function that returns texts of experts, for sources that need them."""
    sentences: SentenceText | None = None
    """Text preprocessing of sentence-transformers for embeddings; None for other models."""
    image_token: int | None = None
    """Token of a part of a picture within a text, if a model reads both."""
    copies: int = 0
    """Number of augmented copies of every picture (`samples.vary`), drawn after all pictures."""

    def pixels(self, images: Sequence[Image]) -> Tensor:
        """Return pictures as `pixel_values` `[n, 3, H, W]` float32.

        Raises:
            InputError: there is no usable processor, or it cannot make one batch of the pictures.
        """
        if self.pictures is not None:
            return self.pictures.prepare(images)
        pixels: Tensor = self._process(images)["pixel_values"]
        return pixels.float()

    def patches(self, images: Sequence[Image]) -> tuple[list[Tensor], Tensor, int]:
        """Return the patches of each picture `[n, values]` float32, their numbers along time, height and width
        `[pictures, 3]`, and the number of them that are one token.

        Raises:
            InputError: there is no usable processor, or it cannot make one batch of the pictures.
        """
        made = self._process(images)
        grid = made["image_grid_thw"].long()
        merged = int(self._processor().merge_size) ** 2
        return list(torch.split(made["pixel_values"].float(), grid.prod(1).tolist())), grid, merged

    def _process(self, images: Sequence[Image]) -> Mapping[str, Tensor]:
        # Copies, because the processor wraps arrays as tensors and pools may be read-only.
        writable = [image.copy() for image in images]
        # Told the format, because it guesses, and wrongly for pictures of 1, 3 or 4 rows.
        options = {"return_tensors": "pt", "input_data_format": "channels_last"}
        try:
            made: Mapping[str, Tensor] = self._processor()(images=writable, **options)
        except ValueError as error:
            raise InputError(f"pictures: the base's image processor cannot make one batch of them ({error})") from error
        return made

    def describe_tools(self) -> dict[str, str]:
        """Return class and backend of image processor or tokenizer, for the record of a run.

        Raises:
            InputError: there is no usable image processor or tokenizer.
        """
        if self.modality != "pixels":
            text = {"text": _class(tokenizer_of(self.folder))}
            return text if self.image_token is None else text | self._describe_picture_tools()
        if self.pictures is not None:
            return dict(self.pictures.made_by)
        return self._describe_picture_tools()

    def _describe_picture_tools(self) -> dict[str, str]:
        return {"pictures": _class(self._processor()), "backend": BACKEND}

    def _processor(self) -> Any:
        """Return the image processor, read once as long as the folder's files stay the same."""
        return _read_processor(self.folder, self.image_processor, _settings(self.folder))


def _class(one: object) -> str:
    return f"{type(one).__module__}.{type(one).__qualname__}"


def prepare_seq2seq(
    examples: Sequence[TextExample], folder: Path, max_length: int = 512, max_target_length: int = 32
) -> Prepared:
    """Return texts as inputs of an encoder-decoder, by the tokenizer in `folder`.

    `input_ids` and `attention_mask` `[n, T]`, padded on the right to the longest; `labels` `[n, U]`, -100 on padding,
    each ending with the end token. Longer inputs and targets keep their beginning and their end token.

    Raises:
        InputError: examples without target, or no usable tokenizer.
    """
    if any(example.target is None for example in examples):
        raise InputError("an encoder-decoder needs answers; give the source 'target' or 'targets'")
    tokenizer = tokenizer_of(folder)
    end = tokenizer.eos_token_id
    inputs = token_ids(tokenizer, [example.input for example in examples])
    targets = [_append_end(ids, end) for ids in token_ids(tokenizer, [str(example.target) for example in examples])]
    cut = [len(i) > max_length or len(t) > max_target_length for i, t in zip(inputs, targets, strict=True)]
    inputs = [_beginning(ids, max_length, end) for ids in inputs]
    targets = [_beginning(ids, max_target_length, end) for ids in targets]
    prepared = {**_pad(inputs, tokenizer), "labels": stack_rows(targets, IGNORED)}
    return Prepared(prepared, sum(cut))


def prepare_causal(examples: Sequence[TextExample], folder: Path, max_length: int = 512) -> Prepared:
    """Return texts as inputs of a decoder, by the tokenizer in `folder`: prompt, target and, if it has one, end token.

    `input_ids`, `attention_mask` and `completion_mask` `[n, T]`, padded on the right to the longest; `completion_mask`
    is 1 on the target's tokens, or equals `attention_mask` without a target. If both together are too long, the prompt
    loses its beginning, except for the start token, down to a quarter of the limit; only then does the target lose its
    end. Every cut example is counted.

    Raises:
        InputError: no usable tokenizer.
    """
    tokenizer = tokenizer_of(folder)
    rows, completions, truncated = [], [], 0
    for prompt, answer in _prompts_with_answers(tokenizer, examples):
        truncated += len(prompt) + len(answer) > max_length
        prompt = _ending(prompt, max(max_length - len(answer), max_length // 4, 1), tokenizer.bos_token_id)
        answer = answer[: max_length - len(prompt)]
        rows.append(prompt + answer)
        completions.append([0] * len(prompt) + [1] * len(answer) if answer else [1] * len(prompt))
    prepared = {**_pad(rows, tokenizer), "completion_mask": stack_rows(completions, 0)}
    return Prepared(prepared, truncated)


def _prompts_with_answers(tokenizer: Any, examples: Sequence[TextExample]) -> list[tuple[list[int], list[int]]]:
    """Return the token ids of the input before each answer of a decoder, and those of the answer; none without one."""
    if written := [example.tokens for example in examples if example.tokens is not None]:
        return written
    end = tokenizer.eos_token_id
    prompts = token_ids(tokenizer, [example.input for example in examples])
    answers = token_ids(tokenizer, [example.target or "" for example in examples], special=False)
    return [
        (prompt, answer) if example.target is None else (_drop_end(prompt, end), _append_end(answer, end))
        for example, prompt, answer in zip(examples, prompts, answers, strict=True)
    ]


def prepare_text(examples: Sequence[TextExample], folder: Path, max_length: int = 512) -> Prepared:
    """Return texts, or pairs of them, as inputs of a classifier, encoded and cut by the tokenizer in `folder`.

    `input_ids` and `attention_mask` `[n, T]`, padded on the right to the longest, and `token_type_ids` if the tokenizer
    tells the texts of a pair. Of a pair the longer text loses its end.

    Raises:
        InputError: no usable tokenizer.
    """
    tokenizer = tokenizer_of(folder)
    texts = [example.input for example in examples]
    pairs = [example.pair for example in examples if example.pair is not None] or None
    options: dict[str, Any] = {"padding": False, "verbose": False}
    encoded = tokenizer(texts, pairs, truncation=False, **options)
    rows = {name: [*map(list, encoded[name])] for name in ("input_ids", "token_type_ids") if name in encoded}
    twice = _rows_begun_twice(tokenizer, texts, rows["input_ids"])
    long = [i for i, ids in enumerate(rows["input_ids"]) if len(ids) - (i in twice) > max_length]
    for i in long:
        # One token more where one is left out below.
        options |= {"truncation": "longest_first", "max_length": max_length + (i in twice)}
        cut = tokenizer(texts[i], None if pairs is None else pairs[i], **options)
        for name, found in rows.items():
            found[i] = list(cut[name])
    for found in rows.values():
        found[:] = [row[i in twice :] for i, row in enumerate(found)]
    prepared = _pad(rows["input_ids"], tokenizer)
    if "token_type_ids" in rows:
        prepared["token_type_ids"] = stack_rows(rows["token_type_ids"], 0)
    return Prepared(prepared, len(long))


def prompt_tokens(prompts: Sequence[str], folder: Path, modality: Modality) -> list[list[int]]:
    """Return the token ids of prompts: for an encoder-decoder whole texts, for a decoder texts that go on.

    Raises:
        InputError: no usable tokenizer.
    """
    tokenizer = tokenizer_of(folder)
    rows = token_ids(tokenizer, prompts)
    return rows if modality == "seq2seq" else [_drop_end(ids, tokenizer.eos_token_id) for ids in rows]


def start_token(folder: Path) -> int | None:
    """Return the token with which a model's texts begin, from its tokenizer or else its settings; None if neither says.

    Raises:
        InputError: no usable tokenizer.
    """
    named = tokenizer_of(folder).bos_token_id
    return read_config(folder, "base").get("bos_token_id") if named is None else named


def prepare_tokens(tokens: Mapping[str, Tensor], folder: Path, modality: Modality) -> Prepared:
    """Return token ids from a file as the inputs that `prepare_seq2seq`, `prepare_causal` or `prepare_text` make.

    Args:
        tokens: `input_ids` `[n, T]`, `attention_mask` `[n, T]` (all 1 by default) and `labels`: for an encoder-decoder
            `[n, U]`; for a decoder `[n, T]`, the ids themselves with -100 on the prompt.

    Raises:
        InputError: labels or mask that do not fit, or padding that is not masked or not on the right.
    """
    ids, labels = tokens["input_ids"], tokens.get("labels")
    mask = tokens.get("attention_mask")
    padding = read_config(folder, "base").get("pad_token_id")
    if mask is None:
        if padding is not None and bool((ids[:, -1] == padding).any()):
            raise InputError(f"rows end with the padding id {padding}; give 'mask', the tensor that is 0 there")
        mask = torch.ones_like(ids)
    if empty := (mask == 0).all(1).nonzero().flatten().tolist():
        raise InputError(f"the mask of row {empty[0]} is 0 everywhere: it has no token; leave it out")
    if bool(((mask != 0) & (mask != 1)).any()) or bool((mask.diff(dim=1) > 0).any()):
        raise InputError("the mask of every row must be ones and then zeros: padding belongs on the right")
    inputs = {"input_ids": ids, "attention_mask": mask}
    if modality == "seq2seq":
        inputs["labels"] = _checked_targets(labels)
    elif modality == "text":
        if labels is not None:
            raise InputError(f"'labels' of a classifier are one class per text [n], not {list(labels.shape)}")
    else:
        inputs["completion_mask"] = mask if labels is None else _completion(ids, mask, labels)
    return Prepared(inputs)


def _checked_targets(labels: Tensor | None) -> Tensor:
    if labels is None:
        raise InputError("an encoder-decoder needs answers; give 'labels', target ids [n, U] with -100 as padding")
    given = labels != IGNORED
    if not bool(given[:, 0].all()) or bool((given.int().diff(dim=1) > 0).any()) or bool((labels[given] < 0).any()):
        raise InputError(f"every row of labels must be target ids and then {IGNORED}")
    return labels


def _completion(ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    given = labels != IGNORED
    if labels.shape != ids.shape or not labels[given].equal(ids[given]) or bool((given & (mask == 0)).any()):
        raise InputError(f"labels of a decoder are its token ids with {IGNORED} on prompt and padding")
    if not bool(given.any(dim=1).all()):
        raise InputError(f"a row of labels is {IGNORED} throughout: nothing would be learnt from it")
    return given.long()


def token_ids(tokenizer: Any, texts: Sequence[str], special: bool = True) -> list[list[int]]:
    """Return the token ids of texts, with special tokens around them if asked, but no second start token in front."""
    options = {"truncation": False, "padding": False, "verbose": False}
    encoded = tokenizer(list(texts), add_special_tokens=special, **options)
    rows = [list(ids) for ids in encoded["input_ids"]]
    twice = _rows_begun_twice(tokenizer, texts, rows) if special else frozenset()
    return [ids[i in twice :] for i, ids in enumerate(rows)]


def _rows_begun_twice(tokenizer: Any, texts: Sequence[str], rows: Sequence[list[int]]) -> frozenset[int]:
    """Return the rows that begin with a start token of the tokenizer before another start token in the text.

    A chat template writes the start token itself, so its text has it already.
    """
    # Few texts begin with one token twice, and only these are read again without special tokens.
    doubtful = [i for i, ids in enumerate(rows) if len(ids) > 1 and ids[0] == ids[1]]
    if not doubtful:
        return frozenset()
    bare = tokenizer([texts[i] for i in doubtful], add_special_tokens=False, verbose=False)["input_ids"]
    # The text's own ids, whole, after the first one: that was added. Otherwise the text writes it twice.
    return frozenset(i for i, own in zip(doubtful, bare, strict=True) if rows[i][1 : len(own) + 1] == list(own))


def _append_end(ids: list[int], end: int | None) -> list[int]:
    return ids if end is None or (ids and ids[-1] == end) else [*ids, end]


def _drop_end(ids: list[int], end: int | None) -> list[int]:
    """Return ids without the end token that some tokenizers add."""
    return ids[:-1] if ids and ids[-1] == end else ids


def _beginning(ids: list[int], limit: int, end: int | None) -> list[int]:
    """Return at most `limit` ids from the beginning, and the end token if there was one."""
    if len(ids) <= limit:
        return ids
    return [*ids[: limit - 1], ids[-1]] if ids[-1] == end else ids[:limit]


def _ending(ids: list[int], limit: int, start: int | None) -> list[int]:
    """Return at most `limit` ids from the end, and the start token if there was one."""
    if len(ids) <= limit:
        return ids
    return [ids[0], *ids[len(ids) - limit + 1 :]] if ids[0] == start else ids[len(ids) - limit :]


def _pad(rows: Sequence[list[int]], tokenizer: Any) -> dict[str, Tensor]:
    padding = tokenizer.pad_token_id or 0  # masked: its value changes nothing
    return {"input_ids": stack_rows(rows, padding), "attention_mask": stack_rows([[1] * len(ids) for ids in rows], 0)}


def stack_rows(rows: Sequence[Sequence[int]], padding: int) -> Tensor:
    """Return rows of whole numbers as one tensor `[n, longest]` int64, padded on the right."""
    return pad_sequence([torch.tensor(row, dtype=torch.int64) for row in rows], True, padding)


def _settings(folder: Path) -> tuple[FileStamp, ...]:
    """Return the state of the files beside a checkpoint's weights."""
    return tuple(one for file in settings_files(folder) for one in stamps(file))


def _named_processor(file: Path, settings: Mapping[str, Any]) -> str:
    """Return the class that settings name, one of `PROCESSORS`; its older names are understood."""
    named = str(settings.get("image_processor_type") or settings.get("feature_extractor_type") or "nothing")
    kind = named.removesuffix("Fast").replace("FeatureExtractor", "ImageProcessor")
    if kind not in PROCESSORS:
        raise InputError(f"base: {file} names the image processor '{named}'; featcal takes {', '.join(PROCESSORS)}")
    return kind


@lru_cache(maxsize=8)
def _read_processor(folder: Path, kind: str, settings: tuple[FileStamp, ...]) -> Any:
    require_packages("torchvision", label="pictures")
    import transformers

    found, timm = image_processor_settings(folder), timm_settings(folder)
    if found is None and timm is not None:
        return transformers.CLIPImageProcessor(**timm)
    if found is None:
        raise InputError(
            f"base: {name_place(folder)} has no {PREPROCESSOR_FILE} (nor {PROCESSOR_FILE}), which pictures need; use a "
            "'tensors' source"
        )
    try:
        processor = getattr(transformers, kind or _named_processor(*found)).from_pretrained(folder)
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"base: {found[0]} is not a usable image processor ({error})") from error
    backend = getattr(processor, "backend", "unknown")
    if backend != BACKEND:
        raise InputError(
            f"transformers prepares pictures with the backend '{backend}' here, but featcal needs '{BACKEND}'; upgrade "
            "transformers"
        )
    return processor


def tokenizer_of(folder: Path) -> Any:
    """Return the tokenizer in a checkpoint folder, read once as long as its files stay the same.

    Raises:
        InputError: there is no tokenizer, or its files are damaged.
    """
    return _read_tokenizer(folder, _settings(folder))


@lru_cache(maxsize=8)
def _read_tokenizer(folder: Path, settings: tuple[FileStamp, ...]) -> Any:
    place = name_place(folder)
    needed = f"base: {place} has no tokenizer (such as tokenizer.json), which text needs; use a 'tensors' source"
    tokenizer = open_tokenizer(folder, InputError(needed))
    if reads_lower_case(folder):
        read_in_lower_case(tokenizer)
    return tokenizer
