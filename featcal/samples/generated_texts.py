"""Let a task's expert write texts to calibrate on, if there are no data.

A decoder writes from its start token alone or continues prompts; an encoder-decoder answers prompts. Texts are drawn
from the model's own distribution (temperature 1), decided by the task's name alone, and all texts of a task are written
at once: seed and number of samples of a calibration select among these texts and never change them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from featcal.models.families.language import IGNORED
from featcal.models.generation import Generator
from featcal.samples.pool import Pool, TextExample
from featcal.samples.prepare import Preparation, prompt_tokens, stack_rows, start_token, tokenizer_of
from featcal.suite.schema import Task
from featcal.suite.source import SelfGenerated
from featcal.system.errors import InputError
from featcal.system.fingerprints import seed_from_text

TOGETHER = 32
"""Number of prompts in one batch."""


def prompt_ids(source: SelfGenerated, spec: Task, preparation: Preparation) -> list[list[int]]:
    """Return the token ids of all prompts of a source.

    Raises:
        InputError: a model that writes no text, an encoder-decoder without prompts, a decoder without a start token, or
            prompts and new tokens beyond the task's limits.
    """
    folder, modality = preparation.folder, preparation.modality
    if modality in ("pixels", "text"):
        raise InputError(
            "'self_generated' is text that an expert writes, and models of pictures and classifiers of text write "
            "none; take samples from elsewhere"
        )
    if modality == "seq2seq" and source.tokens > spec.max_target_length:
        raise InputError(
            f"answers of {source.tokens} tokens, 'max_target_length' is {spec.max_target_length}; lower 'tokens' or "
            "raise the limit"
        )
    if not isinstance(source.prompts, int):
        rows = prompt_tokens(source.prompts, folder, modality)
    elif modality == "seq2seq":
        raise InputError("an encoder-decoder answers what it reads; give 'prompts' as a list of texts")
    elif (start := start_token(folder)) is None:
        raise InputError("the base names no start token; give 'prompts' as a list of texts")
    else:
        rows = [[start]] * source.prompts
    new = 0 if modality == "seq2seq" else source.tokens
    for place, row in enumerate(rows):
        if not row:
            raise InputError(f"prompt {place} has no tokens in the base's tokenizer")
        if len(row) + new > spec.max_length:
            raise InputError(
                f"prompt {place} has {len(row)} tokens, with {new} new ones more than 'max_length' {spec.max_length}; "
                "shorten it, lower 'tokens' or raise the limit"
            )
    return rows


def write_pool(generator: Generator, source: SelfGenerated, spec: Task, preparation: Preparation, task: str) -> Pool:
    """Return the pool of all texts of a source, written by the expert of the task.

    A text from the start token alone is one text, without the token that ends it; the continuation of a prompt is an
    answer, which ends where the expert ends it.

    Raises:
        InputError: a model that writes no text, an encoder-decoder without prompts, a decoder without a start token, or
            prompts and new tokens beyond the task's limits.
    """
    prompts = prompt_ids(source, spec, preparation)
    answers = _continue_prompts(generator, prompts, source.tokens, task)
    if isinstance(source.prompts, int):
        answers = [answer[:-1] if answer[-1] in generator.ends else answer for answer in answers]
        rows, labels = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)], None
    elif generator.encodes:
        rows, labels = prompts, answers
    else:
        rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        labels = [[IGNORED] * len(prompt) + answer for prompt, answer in zip(prompts, answers, strict=True)]
    tokenizer = tokenizer_of(preparation.folder)

    def tokens(wanted: Sequence[int]) -> dict[str, Tensor]:
        own = [rows[index] for index in wanted]
        found = {"input_ids": stack_rows(own, 0), "attention_mask": stack_rows([[1] * len(row) for row in own], 0)}
        return found if labels is None else found | {"labels": stack_rows([labels[i] for i in wanted], IGNORED)}

    def texts(wanted: Sequence[int]) -> list[TextExample]:
        words = [
            tokenizer.batch_decode([one[i] for i in wanted], skip_special_tokens=True) for one in (prompts, answers)
        ]
        if labels is None:
            return [TextExample(answer, None) for answer in words[1]]
        return [TextExample(*both) for both in zip(*words, strict=True)]

    return Pool(len(rows), None, None, texts=texts, tokens=tokens)


def _continue_prompts(generator: Generator, prompts: Sequence[list[int]], tokens: int, task: str) -> list[list[int]]:
    """Return the model's continuation of every prompt; equal on one kind of device, whatever was drawn before."""
    device = generator.model.device
    found: list[list[int]] = []
    # transformers draws from torch's global generators, which must be left as the host had them.
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed_from_text(task))
        for start in range(0, len(prompts), TOGETHER):
            some = prompts[start : start + TOGETHER]
            batch = {
                "input_ids": stack_rows(some, 0),
                "attention_mask": stack_rows([[1] * len(row) for row in some], 0),
            }
            drawn = generator.sample({name: one.to(device) for name, one in batch.items()}, tokens)
            found += [one.tolist() for one in drawn]
    return found
