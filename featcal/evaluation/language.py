"""Score language models: greedy answers, exact match and Spearman correlation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from featcal.evaluation.ranks import rank_correlation
from featcal.family.opening import Family, batches_by_length
from featcal.formats.weights import Weights
from featcal.models.families.language import IGNORED, answer_position, has_answers
from featcal.models.model import Head, answers_apart, task_weights
from featcal.samples.prepare import token_ids, tokenizer_of
from featcal.samples.sources import Samples
from featcal.system.errors import InputError, NoScores

BATCH_SIZE = 64


def first_answers(drawn: Samples) -> Int[Tensor, " n"]:
    """Return the right first token of every answer.

    Raises:
        NoScores: the samples have no answers.
    """
    inputs = drawn.inputs
    if "labels" in inputs and bool((inputs["labels"][:, 0] != IGNORED).all()):
        return inputs["labels"][:, 0]
    if not has_answers(inputs):
        raise NoScores(f"task '{drawn.task}', {drawn.split} samples: no targets; give 'target' in the source")
    rows = torch.arange(len(inputs["input_ids"]))
    return inputs["input_ids"][rows, answer_position(inputs) + 1]


def name_answers(family: Family, head: Head, answers: Sequence[int]) -> dict[int, str]:
    """Return the names of classes, or tokens of text in the spelling of the base's tokenizer, with visible blanks;
    numbers if the base has no tokenizer."""
    if head.classes is not None:
        return {answer: head.classes[answer] for answer in answers}
    return name_tokens(family, answers)


def name_tokens(family: Family, ids: Sequence[int]) -> dict[int, str]:
    """Return tokens of text in the spelling of the base's tokenizer, with visible blanks; numbers if it has no
    tokenizer."""
    try:
        tokenizer = tokenizer_of(family.base_folder)
    except InputError:
        return {token: f"token {token}" for token in ids}
    written = {token: (str(tokenizer.convert_ids_to_tokens(token)), tokenizer.decode([token])) for token in ids}
    # Sentencepiece marks the beginning of a word, which `decode` drops in front of a text.
    blanks = {
        t: "·" if piece.startswith("▁") and not text.startswith(" ") else "" for t, (piece, text) in written.items()
    }
    return {t: blanks[t] + text.replace(" ", "·").replace("\n", "↵") for t, (_, text) in written.items()}


@torch.no_grad()
def generate_answers(family: Family, model: Weights, drawn: Samples, limit: int) -> tuple[str, ...]:
    """Generate a model's answer to every sample: greedy decoding by the library's own `generate`.

    It needs the whole model in memory, in the compute dtype.

    Args:
        limit: largest number of new tokens.

    Raises:
        InputError: a model with a map or a head of its own for the task, which `generate` would ignore.
    """
    if answers_apart(model, drawn.task):
        raise InputError(
            f"task '{drawn.task}': {model.label} has a map or a head of its own for it, which the library's "
            "generate() would ignore; score it by classes (ClassificationHead)"
        )
    tokenizer, generator = tokenizer_of(family.base_folder), family.generator(task_weights(model, drawn.task))
    closing = _closing_tokens(tokenizer, drawn) if "completion_mask" in drawn.inputs else frozenset()
    ends = {} if closing <= generator.ends else {"eos_token_id": sorted(generator.ends | closing)}
    texts: list[str] = []
    batches, places = batches_by_length(drawn, BATCH_SIZE, family.compute.device)
    for batch in batches:
        new = generator.answers(
            batch,
            max_new_tokens=limit,
            # A `max_length` of the model's own generation config would stand beside `max_new_tokens`, and transformers
            # warns.
            max_length=None,
            do_sample=False,
            num_beams=1,
            **ends,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        )
        # Old tokenizers' clean-up takes blanks away ("it ," becomes "it,"), which right answers still have.
        texts += tokenizer.batch_decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return tuple(texts[place].strip() for place in places.tolist())


def note_unreachable(family: Family, drawn: Samples, limit: int) -> tuple[str, ...]:
    """Note that a right answer is longer than what a model may write, so that no answer equals it.

    Args:
        limit: largest number of new tokens.
    """
    written = token_ids(tokenizer_of(family.base_folder), list(drawn.targets or ()), special=False)
    if (longest := max(map(len, written), default=0)) <= limit:
        return ()
    return (
        f"right answers have up to {longest} tokens, and a model may write {limit}: no answer equals the longer ones; "
        "raise the task's max_target_length",
    )


def writable_targets(family: Family, drawn: Samples) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the right answers as the tokenizer writes them, which is how an answer of the very same tokens is read;
    and a note if some are not as the data set has them: a tokenizer may know no capitals, or no double blanks.
    """
    tokenizer, targets = tokenizer_of(family.base_folder), drawn.targets or ()
    ids = token_ids(tokenizer, list(targets), special=False)
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    # An answer of unknown tokens alone would be read as nothing, which every empty answer equals.
    written = tuple(text.strip() or target.strip() for text, target in zip(texts, targets, strict=True))
    differing = [pair for pair in zip(targets, written, strict=True) if pair[0].strip() != pair[1]]
    if not differing:
        return written, ()
    (target, text), *_ = differing
    return written, (
        f"the tokenizer does not write all right answers as the data set does ({target!r} becomes {text!r}); answers "
        "are compared with what it writes",
    )


def _closing_tokens(tokenizer: Any, drawn: Samples) -> frozenset[int]:
    """Return the special tokens after the last word of right answers. The base may not stop at them: a chat template
    ends a turn with a token of its own, and a tokenizer's end token may be another than that of the configuration."""
    special, found = frozenset(tokenizer.all_special_ids), set[int]()
    for ids, counted in zip(drawn.inputs["input_ids"], drawn.inputs["completion_mask"].bool(), strict=True):
        for token in reversed(ids[counted].tolist()):
            if token in special:
                found.add(token)
            elif tokenizer.decode([token]).strip():
                break
    return frozenset(found)


def exact_match(predicted: Sequence[str], right: Sequence[str]) -> float:
    """Return the share of answers that equal the right string, ignoring surrounding blanks.

    >>> exact_match(["yes", "no "], ["yes", "no"])
    1.0
    """
    return sum(a.strip() == b.strip() for a, b in zip(predicted, right, strict=True)) / len(right)


def spearman(predicted: Sequence[str], right: Sequence[str]) -> float:
    """Return the rank correlation of answers read as numbers; an answer that is not a number counts as 0.

    It is 0 if all answers are equal: a constant carries no order.

    Raises:
        InputError: a right answer is not a number, or all of them are the same.

    >>> spearman(["1.0", "2.5", "4.0"], ["0.2", "3.1", "5.0"])
    1.0
    """
    numbers, expected = [to_number(text) for text in predicted], right_numbers(right)
    if len(set(expected)) == 1:
        raise InputError("spearman needs right answers that differ; take more samples")
    # Sums in another order differ in the last bits; a perfect correlation is to be 1.0.
    return round(rank_correlation(np.array(numbers), np.array(expected)), 12)


def right_numbers(right: Sequence[str]) -> list[float]:
    """Read right answers as numbers.

    Raises:
        InputError: one is not a finite number.
    """
    try:
        found = [float(text) for text in right]
    except ValueError as error:
        raise InputError(f"spearman needs numbers as right answers ({error}); set another 'metric'") from error
    if not np.isfinite(found).all():
        raise InputError("spearman needs finite numbers as right answers; set another 'metric'")
    return found


METRICS: Mapping[str, Any] = {"exact_match": exact_match, "spearman": spearman}


def to_number(text: str) -> float:
    """Read an answer as a finite number; 0 if it is not one."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if value == value and abs(value) != float("inf") else 0.0
