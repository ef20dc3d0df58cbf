"""Share code of language models: masks as token weights, a vocabulary, scores of the next token."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from featcal.formats.load_pretrained import load_complete
from featcal.models.adapter import Adapter, Batch, Call
from featcal.models.compute import widen
from featcal.models.generation import Generator, read_generation_config

IGNORED = -100
"""Label by which transformers marks positions that are not targets."""


class LanguageModel(Adapter):
    """A model whose outputs are scores of tokens, so that its decisions are generated text."""

    scores_with = "vocabulary"
    model: Any
    """Skeleton of the whole model."""
    scoring: tuple[str, ...]
    """Canonical name of the one tensor whose rows score the tokens: the head's own, or the embedding it is tied to."""

    @abstractmethod
    def close(self, tensors: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
        """Return states `[…, width]` of the last block after the final norm."""

    @abstractmethod
    def deciding_positions(self, inputs: Batch) -> Tensor:
        """Return 1 at every position `[batch, tokens]` of the last stage that decides a token of the answer, else 0."""

    def answer_features(self, tensors: Mapping[str, Tensor], call: Call, inputs: Batch) -> list[Tensor]:
        if self.answers != "text":
            return super().answer_features(tensors, call, inputs)
        closed, deciding = self.close(tensors, call.hidden_state), self.deciding_positions(inputs)
        return [own[which > 0] for own, which in zip(closed, deciding, strict=True)]

    def output(self, tensors: Mapping[str, Tensor], features: Tensor) -> Tensor:
        """Return the scores of the next token, `[batch, vocabulary]`."""
        return cap_scores(torch.nn.functional.linear(self.scale * features, tensors[self.scoring[0]]), self.softcap)

    def generating(self, tensors: Mapping[str, Tensor], folder: Path) -> Generator:
        """Return the library's own model, entirely on the device of the tensors."""
        return Generator(self.whole(tensors, folder), self.modality == "seq2seq")

    def whole(self, tensors: Mapping[str, Tensor], folder: Path) -> Any:
        """Return the library's own model on the given tensors, with a folder's generation settings."""
        model = self.fresh()
        # A tied head has no tensor of its own, and takes the embedding.
        state = {name: tensors[self.canonical(name) or self.aliases[name]] for name in model.state_dict()}
        # assign: the skeleton is on meta, where a copy would have nowhere to go.
        model.load_state_dict(state, assign=True)
        stated = read_generation_config(folder)
        if stated is not None:
            model.generation_config = stated
        return model.eval()

    @abstractmethod
    def fresh(self) -> Any:
        """Return a new skeleton of the whole model like `model`, not shared with any
        thread; its parameters are on meta.
        """

    def tokens(self, inputs: Batch) -> int:
        return sum(inputs[name].numel() for name in ("input_ids", "labels") if name in inputs)

    def misfit(self, inputs: Batch) -> str | None:
        return unreadable(inputs, self.shapes()[self.vocabulary[0]][0])

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(parameter.shape) for name, parameter in self.model.named_parameters()}

    def is_carried(self, name: str) -> bool:
        return False


def unreadable(inputs: Batch, rows: int) -> str | None:
    """Return the reason why a model with a vocabulary of `rows` tokens cannot take these inputs; None if it can."""
    ids = inputs.get("input_ids")
    if ids is None:
        return "no input_ids; a language model takes text"
    largest = max(int(tensor.max()) for name, tensor in inputs.items() if name in ("input_ids", "labels"))
    if largest >= rows or int(ids.min()) < 0:
        return f"token ids reach from {int(ids.min())} to {largest}, the vocabulary has {rows} rows"
    mask = inputs.get("attention_mask")
    if mask is not None and not bool((mask[:, :-1] >= mask[:, 1:]).all() and mask[:, 0].all()):
        return "the attention mask must be 1 on the tokens and 0 on padding to their right"
    return None


def cap_scores(scores: Tensor, cap: float | None) -> Tensor:
    """Return cap * tanh(scores / cap); the scores themselves if cap is None."""
    return scores if cap is None else cap * torch.tanh(scores / cap)


def zero_masked(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Return states `[batch, tokens, width]` with zeros where `mask` (`[batch, tokens]`, 0 or 1) is 0."""
    return hidden if mask is None else hidden * mask[:, :, None].to(hidden.dtype)


def unpadded_ids(inputs: Batch) -> Tensor:
    """Return the token ids of the text that a model reads, `[batch, tokens]`, with `IGNORED` on padding."""
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    return ids if mask is None else ids.masked_fill(mask == 0, IGNORED)


def mask_to_weights(mask: Tensor | None) -> Tensor | None:
    """Return a mask of 0 and 1 as token weights."""
    return None if mask is None else widen(mask)


def run_norm(module: nn.Module, weight: Tensor, hidden: Tensor) -> Tensor:
    """Return the output of a scale-only norm of the skeleton with the given scale."""
    normed: Tensor = functional_call(module, {"weight": weight}, (hidden,), strict=True)
    return normed


def library_logits(loader: Any, folder: Path, **inputs: Tensor) -> Tensor:
    """Return scores `[batch, tokens, vocabulary]` from a checkpoint folder through transformers."""
    with torch.no_grad():
        logits: Tensor = load_complete(loader, folder)(**inputs, use_cache=False).logits
    return logits


def require_no_cache(call: Call) -> Call:
    """Return `call` itself; raise RuntimeError if it carries a cache, which a replay would change."""
    if call.kwargs.get("past_key_values") is not None:
        raise RuntimeError("a captured call carries a cache; replaying it would not give the same output")
    return call


def random_tokens(rows: int, tokens: int = 7) -> Tensor:
    """Return fixed token ids `[2, tokens]` below `rows`."""
    return torch.randint(0, rows, (2, tokens), generator=torch.Generator().manual_seed(0))


def has_answers(inputs: Batch) -> bool:
    """Say whether answers are told from the texts before them; a text without one is all text."""
    apart = inputs.get("completion_mask")
    return "labels" in inputs or (apart is not None and not torch.equal(apart, inputs["attention_mask"]))


def answer_position(inputs: Batch) -> Tensor:
    """Return the position of the last token of the prompt, `[batch]`; of the last token of the text if there is no
    answer.

    `completion_mask` marks the tokens of the answer, `attention_mask` all but padding; both are 0 or 1.
    """
    ids = inputs["input_ids"]
    attended = inputs.get("attention_mask", torch.ones_like(ids))
    last = attended.sum(1) - 1
    answer = inputs.get("completion_mask")
    if answer is None:
        return last
    # 0 for a text without an answer and for one that is all answer: both are read at their last token.
    first = answer.argmax(1)
    return torch.where(first > 0, first - 1, last)
