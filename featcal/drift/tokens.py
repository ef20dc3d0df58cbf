"""Measure drift token by token: of every patch of a picture, or token of a text, after every layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from featcal.drift.sample_numbers import require_sample
from featcal.drift.streams import LayerTransition, cross
from featcal.formats.weights import Weights
from featcal.models.adapter import LAST_LAYER, walking
from featcal.models.compute import widen
from featcal.models.context import Run
from featcal.models.lane import ExpertPass
from featcal.system.errors import InputError
from featcal.system.formatting import did_you_mean

CLASS_TOKEN, PICTURE, FEATURE = "class token", "picture", "final feature"
"""Parts of a state that are not text: the token before the patches, the patches, and the feature after the head."""

Words = Callable[[list[int]], Mapping[int, str]]
"""Function that names tokens of text by their ids."""


class Token(NamedTuple):
    """One token of a sample's state."""

    part: str
    """Part of the sample to which the token belongs: "class token", "picture", "text", "prompt", "encoder" or
    "decoder" of an encoder-decoder, and after the head "final feature".
    """
    position: int
    """Position within that part, from 0; patches are numbered row by row."""
    word: str | None
    """The token in its tokenizer's spelling; None for tokens that are not text."""


@dataclass(frozen=True)
class LayerTokens:
    """The tokens after one layer: for every sample a tensor `[tokens]` without padding, so lengths differ."""

    layer: str
    tokens: tuple[tuple[Token, ...], ...]
    drift: tuple[Float[Tensor, " _"], ...]
    """||e_t||, e_t = h_model - h_expert of a single token; the root of the sum of their squares is ||e||, the layer's
    drift of the sample."""
    expert_norm: tuple[Float[Tensor, " _"], ...]
    """||h_expert|| of the token."""


@dataclass(frozen=True)
class TokenDrift:
    """The drift of one model on one task, token by token; layers in forward order."""

    layers: tuple[LayerTokens, ...]

    def find(self, layer: str) -> LayerTokens:
        """Return the tokens after a layer.

        Raises:
            InputError: there is no such layer.
        """
        found = {one.layer: one for one in self.layers}
        if layer not in found:
            raise InputError(
                f"there is no layer '{layer}'; the model has {', '.join(found)}.{did_you_mean(layer, [*found])}"
            )
        return found[layer]

    def rows(self, sample: int, layer: str | None = None) -> list[dict[str, Any]]:
        """Return one row per token of a sample after a layer, or after every one: layer, part, position, token (its
        word), drift, relative_drift (over the token's own expert_norm; None where that is 0), expert_norm, and share,
        its part of the layer's squared drift (None without drift).

        Raises:
            InputError: there is no such sample or layer.
        """
        layers = self.layers if layer is None else (self.find(layer),)
        require_sample(sample, len(self.layers[0].drift))
        return [row for one in layers for row in _rows(one, sample)]


def token_drift(run: Run, model: Weights, experts: Mapping[str, ExpertPass], words: Words) -> dict[str, TokenDrift]:
    """Return, by task, the drift of a model from the experts, token by token, from one walk of both. The states are
    those of `decompose`, with all tokens that later layers read: for the decoder of an encoder-decoder, its own tokens
    and the encoder's. After the head a sample has one feature and no tokens.
    """
    found: dict[str, dict[str, list[LayerTokens]]] = {task: {} for task in experts}
    read: dict[tuple[str, str, int], _Named] = {}
    with walking(run.adapter):
        for crossing in cross(run, model, experts):
            expert, reached = (widen(state) for state in _list_tokens(crossing))
            drift, norm = (reached - expert).norm(dim=2).cpu(), expert.norm(dim=2).cpu()
            stage, batch = crossing.place.stage, experts[crossing.task].batches[crossing.position]
            # Of texts all layers of a stage have the same tokens.
            key = crossing.task, stage.name, crossing.position
            if crossing.layer == LAST_LAYER or not stage.token_ids(batch):
                kept, tokens = _name_patches(crossing, drift + norm)
            else:
                kept, tokens = read[key] = read[key] if key in read else _name_texts(stage.token_ids(batch), words)
            apart = ((one[mask], own[mask]) for one, own, mask in zip(drift, norm, kept, strict=True))
            layer = LayerTokens(crossing.layer, tokens, *zip(*apart, strict=True))
            found[crossing.task].setdefault(crossing.layer, []).append(layer)
    return {task: TokenDrift(tuple(_join(batches) for batches in layers.values())) for task, layers in found.items()}


_Named = tuple[Tensor, tuple[tuple[Token, ...], ...]]
"""Mask of the tokens of a batch that are not padding, `[batch, tokens]`, and their names, sample by sample."""


def _list_tokens(crossing: LayerTransition) -> Iterator[Tensor]:
    """Yield expert's and model's states as `[batch, tokens, width]`: a final feature is one token."""
    for state in crossing.after:
        yield state[:, None] if state.ndim == 2 else state


def _name_texts(ids: Mapping[str, Tensor], words: Words) -> _Named:
    """Return the tokens of texts by their ids (`Stage.token_ids`)."""
    listed = {part: [[i for i in row if i >= 0] for row in own.tolist()] for part, own in ids.items()}
    texts = words(sorted({i for rows in listed.values() for row in rows for i in row}))

    def name(row: Sequence[Sequence[int]]) -> tuple[Token, ...]:
        parts = zip(listed, row, strict=True)
        return tuple(Token(part, place, texts[i]) for part, own in parts for place, i in enumerate(own))

    return torch.cat([*ids.values()], dim=1).cpu() >= 0, tuple(map(name, zip(*listed.values(), strict=True)))


def _name_patches(crossing: LayerTransition, sizes: Tensor) -> _Named:
    """Name the tokens of states without text: class token and patches, or the final feature.

    Args:
        sizes: `[batch, tokens]`, 0 where both the expert's and the model's states are 0.
    """
    if crossing.layer == LAST_LAYER:
        return torch.ones_like(sizes, dtype=torch.bool), ((Token(FEATURE, 0, None),),) * len(sizes)
    # A tower that reads pictures of several sizes pads them with zeros after their own patches.
    counts = sizes.flip(1).ne(0).cummax(1).values.sum(1)
    front = (Token(CLASS_TOKEN, 0, None),) if crossing.place.stage.leads else ()
    made = {
        count: (*front, *(Token(PICTURE, place, None) for place in range(count - len(front))))
        for count in set(counts.tolist())
    }
    return torch.arange(sizes.shape[1]) < counts[:, None], tuple(made[count] for count in counts.tolist())


def _join(batches: Sequence[LayerTokens]) -> LayerTokens:
    """Concatenate the samples of several batches."""
    return LayerTokens(
        batches[0].layer,
        tuple(tokens for one in batches for tokens in one.tokens),
        tuple(drift for one in batches for drift in one.drift),
        tuple(norm for one in batches for norm in one.expert_norm),
    )


def _rows(one: LayerTokens, sample: int) -> Iterator[dict[str, Any]]:
    drift, norm = one.drift[sample], one.expert_norm[sample]
    whole = float(drift.square().sum())
    columns = zip(one.tokens[sample], drift.tolist(), norm.tolist(), strict=True)
    for token, moved, size in columns:
        yield {
            "layer": one.layer,
            "part": token.part,
            "position": token.position,
            "token": token.word,
            "drift": moved,
            "relative_drift": moved / size if size else None,
            "expert_norm": size,
            "share": moved**2 / whole if whole else None,
        }
