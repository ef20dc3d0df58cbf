"""Generate text, token by token, with the library's own whole language model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax
from torch.nn.utils.rnn import pad_sequence

from featcal.models.compute import computing
from featcal.system.errors import InputError
from featcal.system.formatting import shorten
from featcal.system.json_files import read_json

_FILE = "generation_config.json"
_PLAIN: Mapping[str, Any] = {
    "return_dict_in_generate": False, "num_return_sequences": 1, "stop_strings": None,
    "cache_implementation": None, "prompt_lookup_num_tokens": None,
}  # fmt: skip
"""Generation options that replace the model's own: one answer per prompt, as a tensor of tokens; and none of the
speedups that need other packages, devices or batches of one.
"""


def read_generation_config(folder: Path) -> Any:
    """Return the generation settings beside a model's weights; None where there are none.

    Raises:
        InputError: the file does not hold generation settings.
    """
    from transformers import GenerationConfig

    file = folder / _FILE
    if not file.is_file():
        return None
    read_json(file)  # its errors say what is wrong and where
    try:
        return GenerationConfig.from_pretrained(folder)
    except (AttributeError, OSError, TypeError, ValueError) as error:
        why = shorten(" ".join(str(error).split()), 200)
        raise InputError(f"{file} does not hold settings of generation ({why}); get the file again") from error


@dataclass(frozen=True)
class Generator:
    """A language model of transformers that answers prompts."""

    model: Any
    encodes: bool
    """True if the prompt goes to an encoder; otherwise the answer continues it."""
    positions: int | None = None
    """Largest number of tokens of prompt and answer together, at which answers end. None
    without a table of positions.
    """
    stated: int | None = None
    """Largest number of tokens of a text by the model's configuration; rotary positions go on beyond it, but the model
    was not trained there. None if the configuration states no number.
    """
    seen: Callable[[Mapping[str, Tensor], Tensor], Mapping[str, Tensor]] | None = None
    """Returns the model's inputs for the pictures of a batch, given the batch and the token ids that it reads; None if
    the model reads no pictures."""
    unsaid: tuple[int, ...] = ()
    """Tokens that are excluded from answers: those that represent pictures, which the
    library would take for further pictures.
    """

    @property
    def ends(self) -> frozenset[int]:
        """Return the tokens that end an answer; none if the model defines none."""
        named = self.model.generation_config.eos_token_id
        if named is None:
            named = self.model.config.eos_token_id
        return frozenset([] if named is None else named if isinstance(named, list) else [named])

    def answers(self, batch: Mapping[str, Tensor], **options: Any) -> Tensor:
        """Return new token ids `[batch, new]`, padded where another answer has more.

        Args:
            options: of transformers' `generate`; `pad_token_id` among them.

        Raises:
            InputError: the model's own settings rule out such an answer.
        """
        padding = options["pad_token_id"] or 0
        return pad_sequence(self._produce(batch, options), batch_first=True, padding_value=padding)

    def each_answer(self, batch: Mapping[str, Tensor], **options: Any) -> list[Tensor]:
        """Return the new token ids of every prompt, `[new]`, up to and including the first token that ends an
        answer; options and errors as in `answers`.
        """
        return [self._cut_at_end(row) for row in self._produce(batch, options)]

    @computing
    def _produce(self, batch: Mapping[str, Tensor], options: Mapping[str, Any]) -> list[Tensor]:
        """Return the new token ids of every prompt, `[new]`; padding only follows a token that ends an answer."""
        if self.encodes:
            ids, mask = batch["input_ids"], batch["attention_mask"]
        else:
            ids, mask = prompts(batch)
        if self.positions is not None:  # + 1: the last token is generated, but never read
            room = max(self.positions - ids.shape[1] + 1, 1)  # pictures take what they take
            wanted = options.get("max_new_tokens", self.positions + 1)
            if room < wanted and len(ids) > 1:
                # Blanks in front of a short prompt would take the room of its answer.
                alone = ({name: tensor[i : i + 1] for name, tensor in batch.items()} for i in range(len(ids)))
                return [row for one in alone for row in self._produce(one, options)]
            options = {**options, "max_new_tokens": min(wanted, room)}
        pictures = self.seen(batch, ids) if self.seen is not None else {}
        if self.unsaid:
            options = {**options, "suppress_tokens": [*self.unsaid]}
        try:
            produced: Tensor = self.model.generate(ids, attention_mask=mask, **pictures, **_PLAIN, **options)
        except (TypeError, ValueError) as error:
            why = shorten(" ".join(str(error).split()), 200)
            raise InputError(f"base: answers cannot be generated with the settings in its {_FILE} ({why})") from error
        return [*produced[:, 1 if self.encodes else ids.shape[1] :]]  # a decoder begins with its start token

    def sample(self, batch: Mapping[str, Tensor], tokens: int) -> list[Tensor]:
        """Draw answers from the model's own distribution, at temperature 1 and without top-k or top-p, by torch's
        global generator.

        Args:
            tokens: largest number of new ones.

        Returns:
            For every prompt the new ids `[tokens]`, up to the token that ends them.
        """
        from transformers import GenerationConfig

        own, ends = self.model.generation_config, sorted(self.ends)
        # Settings of sampling that came with the model would be merged with the options below.
        self.model.generation_config = GenerationConfig(decoder_start_token_id=own.decoder_start_token_id)
        try:
            return self.each_answer(
                batch,
                max_new_tokens=tokens,
                max_length=None,
                do_sample=True,
                num_beams=1,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                eos_token_id=ends or None,
                pad_token_id=min(ends, default=0),
            )
        finally:
            self.model.generation_config = own

    def _cut_at_end(self, answer: Tensor) -> Tensor:
        """Return new tokens `[new]` up to and including the first that ends an answer."""
        stops = [place for place, token in enumerate(answer.tolist()) if token in self.ends]
        return answer[: stops[0] + 1] if stops else answer

    @computing
    @torch.no_grad()
    def log_probabilities(self, batch: Mapping[str, Tensor], answers: Sequence[Tensor]) -> list[Tensor]:
        """Return the log-probability of every token of the vocabulary along the given answers, by teacher forcing.

        Args:
            answers: token ids `[tokens]`, one tensor for each prompt of the batch, on its device.

        Returns:
            `[tokens, vocabulary]` float32 for each.
        """
        given: dict[str, Any]
        if self.encodes:
            labels = pad_sequence(list(answers), batch_first=True, padding_value=0)
            given = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": labels}
            starts, first = [0] * len(answers), 0
        else:
            ids, mask = prompts(batch)
            # Right padding from here on: left padding would shift positions in a plain forward.
            own = [row[kept.bool()] for row, kept in zip(ids, mask, strict=True)]
            # Nothing is predicted by the last token, for which there may be no position.
            rows = [torch.cat([prompt, answer[:-1]]) for prompt, answer in zip(own, answers, strict=True)]
            padded = pad_sequence(rows, batch_first=True)
            lengths = torch.tensor([len(row) for row in rows], device=padded.device)
            attended = (torch.arange(padded.shape[1], device=padded.device) < lengths[:, None]).long()
            pictures = self.seen(batch, padded) if self.seen is not None else {}
            given = {"input_ids": padded, "attention_mask": attended, **pictures}
            starts = [len(prompt) - 1 for prompt in own]
            first = min(starts) if "logits_to_keep" in signature(self.model.forward).parameters else 0
            if first:  # a prompt's own scores of the whole vocabulary are not needed
                given["logits_to_keep"] = padded.shape[1] - first
        logits = self.model(**given, use_cache=False).logits
        return [
            log_softmax(row[start - first : start - first + len(answer)].float(), dim=-1)
            for row, start, answer in zip(logits, starts, answers, strict=True)
        ]


def prompts(batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the prompts of a causal batch without their answers, padded on the left as generation needs it.

    A text without an answer is entirely prompt.

    Returns:
        Token ids and attention mask, `[batch, tokens]`.
    """
    ids, kept = batch["input_ids"], batch["attention_mask"]
    answer = batch.get("completion_mask")
    if answer is not None:
        kept = torch.where(_has_no_answer(answer, kept), kept, kept * (1 - answer))
    width = int(kept.sum(1).max())
    moved, mask = ids.new_zeros(len(ids), width), kept.new_zeros(len(ids), width)
    for row, (own, counted) in enumerate(zip(ids, kept.bool(), strict=True)):
        prompt = own[counted]
        moved[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    return moved, mask


def _has_no_answer(answer: Tensor, kept: Tensor) -> Tensor:
    """Say of every row, `[batch, 1]`, whether its text is marked as an answer as a whole, so that it has none."""
    return (answer == kept).all(1, keepdim=True)


class TextAnswerer:
    """A whole model that answers the prompts of one task, in batches.

    Args:
        tokens: largest number of new ones in an answer.
        answers: the model's answers, where they are known (`answer_together`).
    """

    def __init__(
        self,
        generator: Generator,
        batches: Sequence[Mapping[str, Tensor]],
        tokens: int,
        answers: list[Tensor] | None = None,
    ) -> None:
        self._generator, self._batches, self._tokens, self._known = generator, batches, tokens, answers
        self.ends = generator.ends

    @cached_property
    def answers(self) -> list[Tensor]:
        """Return the model's answer to every prompt, up to the token that ends it: `[tokens]`."""
        if self._known is not None:
            return self._known
        settings: dict[str, Any] = {
            "max_new_tokens": self._tokens, "max_length": None, "do_sample": False, "num_beams": 1,
            "pad_token_id": min(self.ends, default=0),
        }  # fmt: skip
        return [answer for batch in self._batches for answer in self._generator.each_answer(batch, **settings)]

    def log_probabilities(self, answers: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield the model's log-probabilities along given answers, `[tokens, vocabulary]`, prompt by prompt."""
        rest = iter(answers)
        for batch in self._batches:
            some = [*islice(rest, len(batch["input_ids"]))]
            yield from self._generator.log_probabilities(batch, some)


def answer_together(
    generator: Generator, batches: Sequence[Mapping[str, Tensor]], tokens: int, most: int
) -> list[list[Tensor]]:
    """Return a model's answers to the prompts of every batch, `[tokens]` for each prompt, as `TextAnswerer` has them.

    Batches are joined: a token takes one reading of all weights, for 32 answers as for 8. Those with pictures are not,
    nor those whose padding would take the room of answers.

    Args:
        tokens: largest number of new ones in an answer.
        most: largest number of tokens of all prompts and answers of a joined batch, padding included.
    """
    widths = [batch["input_ids"].shape[1] for batch in batches]
    found: list[list[Tensor]] = [[] for _ in batches]
    groups: list[list[int]] = []
    together: list[int] = []
    for place in sorted(range(len(batches)), key=lambda one: -widths[one]):
        if "pixel_values" in batches[place] or widths[place] + tokens > (generator.positions or math.inf):
            groups.append([place])
            continue
        prompts = sum(len(batches[one]["input_ids"]) for one in (*together, place))
        if not together or prompts * (widths[together[0]] + tokens) > most:  # the first of a group is the widest
            groups.append(together := [])
        together.append(place)
    for group in groups:
        joined = batches[group[0]] if len(group) == 1 else _join([batches[one] for one in group])
        answers = iter(TextAnswerer(generator, [joined], tokens).answers)
        for one in group:
            found[one] = [*islice(answers, len(batches[one]["input_ids"]))]
    return found


def _join(batches: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the prompts of several batches as one batch, with padding behind the shorter ones."""
    return {
        name: pad_sequence([row for batch in batches for row in batch[name]], batch_first=True)
        for name in ("input_ids", "attention_mask")
    }


def prompt_batch(batch: Mapping[str, Tensor], longest: int | None = None) -> Mapping[str, Tensor]:
    """Return the prompts of a batch; a text without an answer, such as one that an expert generated, is cut to its
    first half.

    Args:
        longest: number of tokens above which the prompt of a decoder loses its beginning, except its first token.
    """
    kept, answer = batch["attention_mask"], batch.get("completion_mask")
    # Texts with a picture must stay whole, and an encoder's prompts are as long as its samples.
    if "pixel_values" in batch or answer is None:
        return batch
    half = kept * (2 * kept.cumsum(1) <= kept.sum(1, keepdim=True) + 1)
    kept = torch.where(_has_no_answer(answer, kept), half, kept * (1 - answer))
    if longest is not None:
        behind = kept.flip(1).cumsum(1).flip(1)
        kept = kept * ((behind < longest) | (kept.cumsum(1) == 1))
    return {"input_ids": batch["input_ids"], "attention_mask": kept}
