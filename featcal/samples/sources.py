"""Draw samples of a task from the sources that the suite file names.

A *pool* is all samples of a source; `draw_samples` picks some of it, decided only by (seed, task name), and turns them
into the model's inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from featcal.formats.sentences import SentenceText
from featcal.formats.weights import check_finite
from featcal.samples.arrow import read_parquet, splits_of_files
from featcal.samples.class_names import ClassList, find_missing_names, match_names, sort_names
from featcal.samples.conversations import write_turns
from featcal.samples.corruptions import with_corruption
from featcal.samples.hub import read_hub, refuse_saved_to_disk
from featcal.samples.pictured_texts import prepare_pictured
from featcal.samples.pictures import arrays, class_folders, imagefolder
from featcal.samples.pool import Image, Pool, TextExample, decode_in_parts
from featcal.samples.prepare import (
    Preparation,
    Prepared,
    Written,
    prepare_causal,
    prepare_seq2seq,
    prepare_text,
    prepare_tokens,
)
from featcal.samples.records import MOST_LABEL, UNLABELLED, note_splits, table_pool
from featcal.samples.table import read_jsonl
from featcal.samples.tensors import read_tensors, tensors_pool
from featcal.samples.vary import with_copies
from featcal.suite.other_files import refuse_other_files
from featcal.suite.schema import SPLITS, Suite, Task
from featcal.suite.source import Source
from featcal.system.errors import InputError
from featcal.system.extras import MissingPackage
from featcal.system.fingerprints import seed_from_text
from featcal.system.formatting import did_you_mean, some
from featcal.system.in_memory import find_held, is_held
from featcal.system.paths import local_path
from featcal.system.sandbox import require_links_inside
from featcal.system.spread import even_places

__all__ = [
    "Image",
    "Pool",
    "Samples",
    "TextExample",
    "count_as",
    "draw_samples",
    "open_pool",
    "pick_indices",
    "preview_samples",
]


@dataclass(frozen=True)
class Samples:
    """Samples of one task, ready for the model."""

    task: str
    split: str
    inputs: Mapping[str, Tensor]
    """Keyword inputs of the model. Pictures: `pixel_values` `[n, 3, H, W]` float32; of text with pictures `[n, patches,
    values]`, and `image_grid_thw` `[n, 3]`. Text: `input_ids`,
    `attention_mask` `[n, T]` and, where they apply, `labels` `[n, U]`, `completion_mask` or `token_type_ids` `[n, T]`,
    int64."""
    labels: Tensor | None
    """Class indices `[n]` int64, or None if the source has none."""
    indices: tuple[int, ...]
    """Position of every sample among all samples of the split; for an augmented copy that of its picture."""
    class_names: tuple[str, ...] | None
    images: Sequence[Image] | None
    """Pictures before preprocessing, if there are any; read again at every access."""
    texts: tuple[str, ...] | None = None
    """Texts that the model reads, before they are tokenized."""
    targets: tuple[str, ...] | None = None
    """The right answers."""
    second: Mapping[str, Tensor] | None = None
    """Inputs of the second texts of pairs; `inputs` are those of the first."""
    truncated: int = 0
    """Number of samples whose text was truncated at the task's limits."""
    total: int = 0
    """Samples in the whole draw, of which these may be a part."""
    counted_names: bool = False
    """True if labels count `class_names` in sorted order, because the data set has no numbers."""
    notes: tuple[str, ...] = ()
    """Remarks on samples or options that were left out, and on classes that were matched by position."""

    def __len__(self) -> int:
        return len(self.indices)

    def classes(self) -> ClassList | None:
        """Return the classes behind the labels; None without labels or names."""
        if self.labels is None or self.class_names is None:
            return None
        return ClassList(self.class_names, "the task", self.counted_names)


def draw_samples(
    suite: Suite,
    task: str,
    split: str,
    count: int | None,
    seed: int,
    preparation: Preparation,
    part: slice = slice(None),
) -> Samples:
    """Return `count` samples of a split, or all of them (None, or more than there are).

    Args:
        part: the drawn samples to prepare; the draw itself does not depend on it.

    Raises:
        InputError: the task has no such split, the source cannot be read, is empty or is of another modality, inputs
            are not finite, or copies are asked for of samples that are not pictures any more.
    """
    spec, pool, picked, label = _open_task(suite, task, split, count, seed, preparation.written)
    copies = preparation.copies
    places = tuple(copy * pool.size + i for copy in range(1 + copies) for i in picked)
    indices, total = places[part], len(places)
    with name_problems(label):
        pool = with_copies(pool, copies, seed, task) if copies else pool
        if pool.is_text != (preparation.modality != "pixels"):
            has, takes = ("text", "pictures") if pool.is_text else ("pictures", "text")
            raise InputError(f"the source holds {has}, the base takes {takes}; see the kinds of sources")
        classes = _classes(pool, [place % pool.size for place in indices], spec.classes)
        make = _draw_text if pool.is_text else _draw_pictures
        drawn = make(spec, pool, indices, preparation, (task, split))
    if not pool.is_text:
        check_finite(drawn.inputs["pixel_values"], label, "leave out the sample, or prepare it again")
    if drawn.second is None:  # two texts that are compared have no class
        drawn = replace(drawn, **classes)
    return replace(drawn, indices=tuple(place % pool.size for place in indices), total=total)


def preview_samples(
    suite: Suite, task: str, split: str, count: int | None, seed: int, written: Written | None = None
) -> Samples:
    """Return the raw samples of a draw, without inputs of a model; pictures are read at every access.

    Args:
        written: returns texts of experts, for a source that needs them.

    Raises:
        InputError: the task has no such split, or the source cannot be read or is empty.
    """
    spec, pool, picked, label = _open_task(suite, task, split, count, seed, written)
    indices = tuple(picked)
    with name_problems(label):
        texts, targets = _words(pool.texts(indices)) if pool.texts is not None else (None, None)
        classes = _classes(pool, indices, spec.classes)
    images = None if pool.images is None or pool.is_text else _Pictures(pool.images, indices)
    drawn = Samples(task, split, {}, None, indices, None, images, texts, targets, total=len(indices))
    return replace(drawn, **classes)


def count_as(drawn: Samples, head: tuple[str, ...]) -> Samples:
    """Return samples with labels that count the classes in the order of a head, found by their names.

    Samples whose names do not tell that order stay as they are: only scores use labels, and scoring reports the
    problem.

    Args:
        head: the names of the classes that the head scores, in its order.
    """
    classes = drawn.classes()
    if classes is None or drawn.labels is None or not head:
        return drawn
    found = match_names(classes, ClassList(head, "the expert's head"))
    if found.problem:
        return drawn
    names = list(head)
    for name, place in zip(classes.names, found.places, strict=True):
        names[place] = name
    labels = torch.tensor(found.places)[drawn.labels]
    notes = (*drawn.notes, found.note) if found.note else drawn.notes
    return replace(drawn, labels=labels, class_names=tuple(names), counted_names=False, notes=notes)


def _open_task(
    suite: Suite, task: str, split: str, count: int | None, seed: int, written: Written | None
) -> tuple[Task, Pool, list[int], str]:
    """Return a task, the pool of its split, the samples that are drawn, and the name of the samples in messages."""
    spec = suite.task(task)
    source = spec.source(split)
    label = f"task '{task}', {split} samples"
    if source is None:
        raise InputError(f"{label}: the suite gives none; add '{split}:' to the task")
    if source.self_generated is not None and written is not None:
        with name_problems(label):
            pool = written(task)
    else:
        pool = open_scored_pool(suite, task, split)
    if not pool.size:
        raise InputError(f"{label}: the source is empty")
    picked = drawn_rows(pool.size, source.limit, count, seed, task)
    if pool.prepare is not None:
        with name_problems(label):
            # Those of all parts of the draw: what is fetched depends on how many there are.
            pool.prepare(picked)
    return spec, pool, picked, label


def _draw_pictures(
    spec: Task, pool: Pool, indices: tuple[int, ...], preparation: Preparation, name: tuple[str, str]
) -> Samples:
    if pool.tensors is not None:
        images, pixels = None, pool.tensors(indices).float()
    else:
        assert pool.images is not None
        images = _Pictures(pool.images, indices)
        pixels = _join_parts([preparation.pixels(some) for some in decode_in_parts(images)])
    return Samples(*name, {"pixel_values": pixels}, None, indices, None, images)


def _join_parts(parts: Sequence[Tensor]) -> Tensor:
    """Return all pixels as one tensor; raise InputError where the image processor left pictures of several sizes."""
    sizes = list(dict.fromkeys(tuple(part.shape[1:]) for part in parts))
    if len(sizes) > 1:
        listed = some([str(list(size)) for size in sizes])
        raise InputError(
            "pictures: the base's image processor cannot make one batch of them, for it leaves them of shapes "
            f"{listed}; crop or resize the pictures to one size, or let the processor (do_resize, do_center_crop)"
        )
    return torch.cat(list(parts))


def _draw_text(
    spec: Task, pool: Pool, indices: tuple[int, ...], preparation: Preparation, name: tuple[str, str]
) -> Samples:
    folder, modality = preparation.folder, preparation.modality
    examples = None if pool.texts is None else pool.texts(indices)
    if examples is not None and any(example.conversation is not None for example in examples):
        examples = write_turns(examples, folder, modality)
    texts, targets = _words(examples) if examples is not None else (None, None)
    if pool.tokens is not None:
        inputs = prepare_tokens(pool.tokens(indices), folder, modality).inputs
        return Samples(*name, inputs, None, indices, None, None, texts, targets)
    assert examples is not None
    if (pool.images is None) != (preparation.image_token is None):
        has, takes = ("no pictures", "one with every text") if pool.images is None else ("pictures", "text alone")
        raise InputError(f"the texts come with {has}, the base takes {takes} (the option 'image' beside 'input')")
    sentences, longest = preparation.sentences, longest_text(spec, preparation.sentences)
    examples, apart = _split_pairs(examples, preparation)
    if modality != "text" and any(example.pair is not None for example in examples):
        raise InputError("a model that writes answers reads one text; write both into 'input', and leave 'pair' out")
    if sentences is not None:
        examples = _add_prompt(examples, sentences.prompt)
    made: Prepared
    if pool.images is not None:
        made = prepare_pictured(examples, _Pictures(pool.images, indices), preparation, spec.max_length)
    elif modality == "seq2seq":
        made = prepare_seq2seq(examples, folder, spec.max_length, spec.max_target_length)
    elif modality == "text":
        made = prepare_text(examples, folder, longest)
    else:
        made = prepare_causal(examples, folder, spec.max_length)
    if apart is not None:
        assert sentences is not None
        second = prepare_text(_add_prompt(apart, sentences.prompt), folder, longest)
        cut = made.truncated + second.truncated
        return Samples(*name, made.inputs, None, indices, None, None, texts, targets, second.inputs, cut)
    return Samples(*name, made.inputs, None, indices, None, None, texts, targets, truncated=made.truncated)


def _split_pairs(
    examples: list[TextExample], preparation: Preparation
) -> tuple[list[TextExample], list[TextExample] | None]:
    """Return first and second texts of pairs that are compared; for other samples all of them and None.

    Raises:
        InputError: such pairs for a model that has no embeddings.
    """
    if not any(example.pair is not None and example.target is not None for example in examples):
        return examples, None
    if preparation.sentences is None:
        raise InputError(
            "pairs with a number ('pair' and 'target') are compared by embeddings, for which the base must be a folder "
            "of sentence-transformers"
        )
    first = [replace(example, pair=None) for example in examples]
    return first, [replace(example, input=str(example.pair), pair=None) for example in examples]


def _add_prompt(examples: list[TextExample], prompt: str) -> list[TextExample]:
    """Return texts with a prompt in front of each."""
    return [replace(one, input=f"{prompt}{one.input}") for one in examples]


def longest_text(spec: Task, sentences: SentenceText | None) -> int:
    """Return the tokens at which a task's texts are cut: the suite file's number, else that of a sentence-transformers
    folder, else the default."""
    own = None if sentences is None or spec.says_length else sentences.max_seq_length
    return spec.max_length if own is None else own


def _words(examples: Sequence[TextExample]) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
    """Return the texts that the model reads, and the right answers if there are any."""
    targets = tuple(example.target for example in examples if example.target is not None)
    read = (example.input if example.pair is None else f"{example.input}\n{example.pair}" for example in examples)
    return tuple(read), targets or None


def _classes(pool: Pool, indices: Sequence[int], wanted: tuple[str, ...] | None) -> dict[str, Any]:
    """Return the classes of drawn samples: labels, class names in their order, and notes.

    Args:
        wanted: the classes that the suite lists, in whose order labels are to count.

    Raises:
        InputError: a label without a name, or names of the source and of the suite that contradict each other.
    """
    own = pool.class_names
    drawn = None if pool.labels is None else pool.labels[list(indices)]
    if drawn is None:
        return {"class_names": wanted or own, "notes": pool.notes}
    _check_labels(drawn)
    labels = torch.from_numpy(drawn.astype(np.int64))
    _require_names(labels, own or wanted)
    found: dict[str, Any] = {"class_names": own, "counted_names": pool.counted_names, "notes": pool.notes}
    if wanted and own:
        listed = ClassList(wanted, "'classes'", renames=True)
        matching = match_names(ClassList(own, "the source", pool.counted_names), listed)
        if matching.problem:
            raise InputError(matching.problem)
        labels = torch.tensor(matching.places)[labels]
        _require_names(labels, wanted)
        found["notes"] = (*pool.notes, *filter(None, [matching.note]))
    if wanted:
        found |= {"class_names": wanted, "counted_names": False}
    return {**found, "labels": labels}


def _require_names(labels: Tensor, names: tuple[str, ...] | None) -> None:
    """Raise InputError for a label that has no name."""
    if names is not None and int(labels.max()) >= len(names):
        raise InputError(f"label {int(labels.max())} has no name, there are {len(names)} classes")


class _Pictures(Sequence[Image]):
    """Drawn pictures, fetched from their pool at every access."""

    def __init__(self, fetch: Callable[[Sequence[int]], list[Image]], indices: Sequence[int]) -> None:
        self._fetch = fetch
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Image: ...
    @overload
    def __getitem__(self, index: slice) -> list[Image]: ...
    def __getitem__(self, index: int | slice) -> Image | list[Image]:
        if isinstance(index, slice):
            return self._fetch(self._indices[index])
        return self._fetch([self._indices[index]])[0]


def pick_indices(size: int, count: int | None, seed: int, task: str) -> tuple[int, ...]:
    """Return rising indices of `count` out of `size` samples, decided by (seed, task) alone; all of them for None, or
    if there are no more. Raise InputError for a count below 1 or a seed below 0."""
    if seed < 0:
        raise InputError(f"seed is {seed}; it is at least 0")
    if count is not None and count < 1:
        raise InputError(f"{count} samples asked for; at least one is needed")
    return tuple(range(size)) if count is None or count >= size else tuple(sorted(_order(size, seed, task)[:count]))


def _order(size: int, seed: int, task: str) -> list[int]:
    # The generator is the draw's own: with the global one other tasks and libraries would change the samples.
    generator = torch.Generator().manual_seed(seed_from_text(f"{seed}:{task}"))
    order: list[int] = torch.randperm(size, generator=generator).tolist()
    return order


def drawn_rows(size: int, limit: int | None, count: int | None, seed: int, task: str) -> list[int]:
    """Return the rows, out of `size`, that a draw of `count` samples takes; of a source's `limit` if it has one, which
    are spread evenly, because sources are often sorted by class."""
    available = even_places(size, limit or size)
    return [available[place] for place in pick_indices(len(available), count, seed, task)]


def rows_in_order(size: int, limit: int | None, count: int, seed: int, task: str) -> list[int]:
    """Return the same rows as `drawn_rows`, ordered so that a draw of fewer samples takes the first of them."""
    available = even_places(size, limit or size)
    return [available[place] for place in _order(len(available), seed, task)[:count]]


def open_scored_pool(suite: Suite, task: str, split: str) -> Pool:
    """Return the pool of a task's split. If labels only count their names, the classes of the local splits before it in
    `SPLITS` are counted, too: a test split that lacks a class is scored among as many as there are, and calibration
    opens no other split.

    Raises:
        InputError: as `open_pool`, and there is no such split.
    """
    spec, label = suite.task(task), f"task '{task}', {split} samples"
    source = spec.source(split)
    if source is None:
        raise InputError(f"{label}: the suite gives none; add '{split}:' to the task")
    pool = open_pool(source, split, suite.root, label)
    if spec.classes is not None or not pool.counted_names or not isinstance(pool.labels, np.ndarray):
        return pool
    own, others, notes = pool.class_names or (), list[tuple[str, ...]](), [*pool.notes]
    for other in SPLITS[: SPLITS.index(split)]:
        try:
            others.append(_counted_names(spec.source(other), other, suite.root))
        except InputError as error:
            notes.append(f"classes of the {other} samples that are in none of these are not counted: {error}")
    missing = find_missing_names(own, *others)
    names = sort_names((*own, *missing))
    labels = np.array([names.index(name) for name in own], dtype=np.int64)[pool.labels]
    if missing:
        which = f"{some(missing)}, classes of the task's other samples"
        notes.append(f"no sample is of {which}; they are counted all the same")
    return replace(pool, labels=labels, class_names=names, notes=tuple(notes))


def _counted_names(source: Source | None, split: str, root: Path) -> tuple[str, ...]:
    """Return the class names that the labels of a local source count."""
    if source is None or source.hub is not None or source.self_generated is not None:
        return ()
    if source.imagefolder is not None and source.label is None:
        return class_folders(local_path(source.imagefolder, root, "imagefolder"))
    pool = open_pool(source, split, root, f"{split} samples")
    return (pool.class_names or ()) if pool.counted_names else ()


def open_pool(source: Source, split: str, root: Path, label: str) -> Pool:
    """Return the pool of a source; `label` names it in errors.

    Raises:
        InputError: it cannot be read, or its labels are not one whole number >= 0 per sample.
    """
    with name_problems(label):
        pool = _open_pool(source, split, root)
        if source.corruption is not None and pool.images is not None:
            pool = replace(pool, images=with_corruption(pool.images, source.corruption))
        labels = pool.labels
        if isinstance(labels, np.ndarray):
            if labels.shape != (pool.size,) or labels.dtype.kind not in "iu":
                raise InputError(
                    f"labels are {labels.dtype} {list(labels.shape)}, expected one integer for each of {pool.size}"
                )
            _check_labels(labels)
    return pool


def _check_labels(labels: NDArray[np.integer]) -> None:
    """Raise InputError for labels that are no class indices."""
    if labels.size and labels.min() < 0:
        hint = f"; {UNLABELLED}" if labels.min() == -1 else ""
        raise InputError(f"label {labels.min()} is negative; labels count from 0{hint}")
    if labels.size and labels.max() > MOST_LABEL:
        raise InputError(f"label {labels.max()} is beyond {MOST_LABEL}; labels count classes from 0")


def _open_pool(source: Source, split: str, root: Path) -> Pool:
    if source.self_generated is not None:
        raise InputError("text that the task's expert writes cannot be read without the expert's model")
    if source.embedded is not None:
        return _embedded_pool(source.embedded, source.split or split)
    if source.hub is not None:
        table = read_hub(source.hub, root, source.config, str(source.split), source.revision)
        return table_pool(table, source, None)
    if source.rows is not None:
        return table_pool(find_held(source.rows, "rows"), source, None)
    if is_held(source.tensors):
        return tensors_pool(find_held(str(source.tensors), "tensors").tensors, source)
    path = local_path(str(getattr(source, source.kind)), root, source.kind)
    if not path.exists():
        raise InputError(f"{path} does not exist")
    require_links_inside(path, source.kind)
    refuse_saved_to_disk(path)
    if source.jsonl is None:  # JSON Lines may have any name
        refuse_other_files(path)
    if source.tensors is not None:
        return tensors_pool(read_tensors(path, source), source)
    if source.arrays is not None:
        return arrays(path, source.split or split)
    if source.imagefolder is not None:
        return imagefolder(path, source.label)
    if source.jsonl is not None:
        return table_pool(read_jsonl(path), source, source.split)
    rows, by_file = read_parquet(path, source.split)
    pool = table_pool(rows, source, None if by_file else source.split)
    return pool if source.split is not None else replace(pool, notes=(*pool.notes, *note_splits(splits_of_files(path))))


def _embedded_pool(task: str, split: str) -> Pool:
    from featcal.samples import embedded_pictures

    if task not in embedded_pictures.CLASSES:
        raise InputError(f"no embedded task '{task}'.{did_you_mean(task, embedded_pictures.CLASSES)}")
    if split not in embedded_pictures.SPLITS:
        raise InputError(f"embedded tasks have no split '{split}', only {', '.join(embedded_pictures.SPLITS)}")
    images, labels = embedded_pictures.render(task, split)
    return Pool(len(images), labels, embedded_pictures.CLASSES[task], lambda wanted: [images[i] for i in wanted])


@contextmanager
def name_problems(label: str) -> Iterator[None]:
    """Put the name of the samples in front of every problem with them; a missing package is none of theirs."""
    try:
        yield
    except MissingPackage:
        raise
    except InputError as error:
        raise InputError(*(f"{label}: {problem}" for problem in error.problems)) from error
