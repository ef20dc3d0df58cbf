"""Find the adapter for a checkpoint's configuration."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import torch

from featcal.models.adapter import Adapter
from featcal.models.families.decoder_facts import FACTS, DecoderFacts, with_classifier
from featcal.models.families.encoder_facts import ENCODERS, EncoderFacts
from featcal.models.families.vision_language_facts import VISION_LANGUAGE, VisionLanguageFacts
from featcal.system.errors import InputError
from featcal.system.extras import load_entry_point

GROUP = "featcal.architectures"
"""Group of the entry points by which packages add rows of facts, each named by its `model_type`."""


def adapter_for(
    config: Mapping[str, Any],
    names: Collection[str],
    device: torch.device,
    label: str,
    text_tower: bool = False,
    classifies: bool = False,
) -> Adapter:
    """Return the adapter of a checkpoint.

    Args:
        config: content of its `config.json`.
        names: names of its tensors, stored or canonical, which show whether it has its own head.
        text_tower: whether the text tower beside one for pictures is merged, too.
        classifies: as for `architecture_for`.

    Raises:
        InputError: an architecture that featcal does not know, or a config that does not describe it.
    """
    from huggingface_hub.errors import StrictDataclassError

    architecture = _with_text_tower(config, label) if text_tower else architecture_for(config, label, classifies)
    try:
        return architecture(config, names, device)
    except InputError as error:
        raise InputError(*(f"{label}: {problem}" for problem in error.problems)) from error
    except (TypeError, ValueError, KeyError, ZeroDivisionError, StrictDataclassError) as error:
        what = " ".join(str(error).split())
        kind = config.get("model_type")
        raise InputError(f"{label}: its configuration does not describe a model of type '{kind}': {what}") from error


def architecture_for(config: Mapping[str, Any], label: str, classifies: bool = False) -> type[Adapter]:
    """Return the class of adapter for a `config.json`.

    Args:
        classifies: whether a decoder's models have a classifier per task in place of their language-modelling head,
            which the base alone does not say (`Located.classifies` of any model of the suite).

    Raises:
        InputError: an architecture that featcal does not know (the message lists those it knows), or that the installed
            transformers does not have.
    """
    kind = config.get("model_type")
    # timm's `config.json` has no model_type.
    if kind is None and "architecture" in config and ("pretrained_cfg" in config or "num_classes" in config):
        kind = "timm"
    if kind in _HOMES:
        module, name = _HOMES[kind]
        adapter: type[Adapter] = getattr(import_module(module), name)
        return adapter
    row = find_row(kind)
    if row is not None:
        return _require_adapter(_classifying(row, label) if classifies else row, label)
    if kind is not None:
        reasons = _why_not(config)
        if not reasons and not classifies:
            found, reasons = _find_facts(config)
            if found is not None:
                return _require_adapter(found, label)
        what = f"architecture '{kind}' is not supported{''.join(f': {why}' for why in reasons)}"
    else:
        what = "its config.json names no model_type, so it is not a model of transformers"
    raise InputError(
        f"{label}: {what}; featcal reads {', '.join(supported_types())}; to add one, see 'An architecture of your "
        "own' in docs/architectures.md"
    )


def find_row(kind: object) -> DecoderFacts | EncoderFacts | None:
    """Return the row of facts of a `model_type`; None without one.

    It is featcal's own, one registered in this process, or one that an installed package brings by an entry point of
    the group `featcal.architectures`.

    Raises:
        InputError: a package's row cannot be imported, or is none of this `model_type`.
    """
    if kind not in _FACTS and kind in _entry_points():
        _load(_entry_points()[str(kind)])
    return _FACTS.get(str(kind))


def _load(brought: EntryPoint) -> None:
    whose, facts = load_entry_point(brought, "architecture")
    if not isinstance(facts, DecoderFacts | EncoderFacts) or facts.model_type != brought.name:
        raise InputError(
            f"{whose}: {brought.value} is no DecoderFacts or EncoderFacts with model_type '{brought.name}'"
        )
    _register(facts)


@cache
def _entry_points() -> Mapping[str, EntryPoint]:
    """Return the entry points of installed packages by `model_type`."""
    return {one.name: one for one in entry_points(group=GROUP)}


def _find_facts(config: Mapping[str, Any]) -> tuple[DecoderFacts | None, list[str]]:
    """Return the facts of a language model without a row, or the reason why it cannot run without one."""
    from huggingface_hub.errors import StrictDataclassError

    from featcal.models.families.found_decoder import find_decoder

    try:
        return find_decoder(config), []
    except InputError as error:
        why = str(error)
    except (
        AssertionError,
        AttributeError,
        LookupError,
        RuntimeError,
        StrictDataclassError,
        TypeError,
        ValueError,
    ) as error:
        # The library's own code, on models that nobody tried.
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return None, [f"no row of facts describes it, and it is not read without one: {why}"]


def _with_text_tower(config: Mapping[str, Any], label: str) -> type[Adapter]:
    """Return the adapter class for both towers of a model.

    Raises:
        InputError: an architecture that featcal does not know, or whose text tower cannot be merged.
    """
    architecture_for(config, label)
    kind = config.get("model_type")
    towers = import_module("featcal.models.families.text_tower")
    if kind == "clip":
        return towers.ClipTowers  # type: ignore[no-any-return]
    if kind == "siglip":
        return towers.siglip_towers()  # type: ignore[no-any-return]
    raise InputError(
        f"{label}: 'text_tower: own' is for whole models of type clip and siglip of transformers, this one is of type "
        f"'{kind}'; leave 'text_tower' out"
    )


def supported_types() -> list[str]:
    """Return every `model_type` that featcal reads, registered ones and those of installed packages included."""
    return list(dict.fromkeys([*_HOMES, *_FACTS, *_entry_points()]))


def register_decoder(facts: DecoderFacts) -> None:
    """Make a decoder-only architecture known in this process by its `model_type`, in place of an earlier row.

    `featcal.testing.check_adapter` checks whether the facts are true.

    Raises:
        InputError: an adapter of featcal's own has this `model_type`.

    >>> import featcal
    >>> facts = featcal.DecoderFacts(model_type="my-llama", config="LlamaConfig", model="LlamaForCausalLM")
    >>> featcal.register_decoder(facts)
    >>> try:
    ...     featcal.register_decoder(featcal.DecoderFacts(model_type="t5", config="T5Config", model="T5Model"))
    ... except featcal.InputError as error:
    ...     print(error)
    't5' is an architecture of featcal's own; register another model_type
    """
    _register(facts)


def register_encoder(facts: EncoderFacts) -> None:
    """Make an encoder with a classification head known in this process by its `model_type`, in place of an earlier row.

    Raises:
        InputError: an adapter of featcal's own has this `model_type`.

    >>> import featcal
    >>> from dataclasses import replace
    >>> from featcal.models.families.encoder_facts import ENCODERS
    >>> bert = next(facts for facts in ENCODERS if facts.model_type == "bert")
    >>> featcal.register_encoder(replace(bert, model_type="my-bert"))
    >>> try:
    ...     featcal.register_encoder(bert)
    ... except featcal.InputError as error:
    ...     print(error)
    'bert' is an architecture of featcal's own; register another model_type
    """
    _register(facts)


@contextmanager
def register_meanwhile(facts: DecoderFacts | EncoderFacts) -> Iterator[None]:
    """Make facts known in this process inside a `with`, unless they are featcal's own; then what was known before.

    Raises:
        InputError: an adapter of featcal's own has this `model_type`.
    """
    if facts in (*_OWN, *map(with_classifier, FACTS)):
        yield
        return
    before = dict(_FACTS)
    _register(facts)
    try:
        yield
    finally:
        _FACTS.clear()
        _FACTS.update(before)


def _register(facts: DecoderFacts | EncoderFacts) -> None:
    if facts.model_type in {*_HOMES, *(one.model_type for one in _OWN)}:
        raise InputError(f"'{facts.model_type}' is an architecture of featcal's own; register another model_type")
    _FACTS[facts.model_type] = facts


@cache
def _adapter_of(facts: DecoderFacts | EncoderFacts) -> type[Adapter]:
    if isinstance(facts, EncoderFacts):
        from featcal.models.families.encoder import encoder_of

        return encoder_of(facts)
    if isinstance(facts, VisionLanguageFacts):
        from featcal.models.families.vision_language import vision_language_of

        return vision_language_of(facts)
    from featcal.models.families.decoder import adapter_of

    return adapter_of(facts)


def _classifying(facts: DecoderFacts | EncoderFacts, label: str) -> DecoderFacts | EncoderFacts:
    """Return the row with a classifier per task; an encoder's and a vision-language model's row unchanged.

    Raises:
        InputError: transformers has no class with a classifier for a decoder.
    """
    if not isinstance(facts, DecoderFacts) or isinstance(facts, VisionLanguageFacts):
        return facts
    found = with_classifier(facts)
    if found is None:
        named = facts.model if isinstance(facts.model, str) else facts.model.__name__
        raise InputError(
            f"{label}: transformers has no class with a classifier of type '{facts.model_type}'; give the {named} that "
            "experts were made from"
        )
    return found


def _require_adapter(facts: DecoderFacts | EncoderFacts, label: str) -> type[Adapter]:
    try:
        return _adapter_of(facts)
    except AttributeError as error:
        raise InputError(
            f"{label}: the installed transformers does not have '{facts.model_type}' ({error}); upgrade it"
        ) from error


_HOMES = {
    "clip": ("featcal.models.families.clip", "ClipVision"),
    "clip_vision_model": ("featcal.models.families.clip", "ClipVision"),
    "open_clip": ("featcal.models.families.open_clip", "OpenClip"),
    "t5": ("featcal.models.families.t5", "T5"),
    "timm": ("featcal.models.families.timm_vit", "TimmVit"),
}
"""`model_type` → module and class, imported when needed, since each imports its part of transformers."""

_OWN: tuple[DecoderFacts | EncoderFacts, ...] = (*FACTS, *ENCODERS, *VISION_LANGUAGE)
_FACTS = {facts.model_type: facts for facts in _OWN}
"""`model_type` → facts of a decoder-only architecture or of an encoder."""

_NAFLEX = (
    "its pictures keep their shape, as patches with a mask of padding and a height and width each "
    "('pixel_attention_mask', 'spatial_shapes'), which no stage reads; SigLIP 2 at a fixed resolution has files of the "
    "type 'siglip', which are read"
)
_WHY_NOT = {"siglip2": _NAFLEX, "siglip2_vision_model": _NAFLEX}
"""`model_type` → the reason why featcal does not read that type, if a configuration does not show the reason."""

_TELLING = (
    ("experts", "a mixture of experts that no row of facts describes"),
    ("vision_config", "a model of pictures and text"),
    ("audio_config", "a model of sound and text"),
    ("mamba", "a model with state-space layers"),
    ("ssm", "a model with state-space layers"),
    ("state_size", "a model with state-space layers"),
    ("linear_attention", "a model with layers of linear attention"),
    ("linear_conv_kernel", "a model with layers of linear attention"),
    ("conv_L_cache", "a model with layers of short convolutions"),
    ("lru_width", "a model with recurrent layers"),
    ("rescale_every", "a model with recurrent layers"),
)
"""Parts of names in a `config.json` → the kind of model that has them."""


def _why_not(config: Mapping[str, Any]) -> list[str]:
    """Return, in at most one sentence, the reason why an unknown architecture is not
    supported, judged by its configuration.
    """
    if config.get("model_type") in _WHY_NOT:
        return [_WHY_NOT[config["model_type"]]]
    kinds = [str(one) for one in config.get("layer_types") or ()]
    for part, what in _TELLING:
        layers = [number for number, kind in enumerate(kinds) if part in kind]
        if layers:
            more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
            count = "layer" if len(layers) == 1 else "layers"
            which = f"{count} {', '.join(map(str, layers[:3]))}{more}: '{kinds[layers[0]]}'"
            return [f"{what} ({which})"]
        named = next((name for name, value in config.items() if value and part in name), None)
        if named is not None:
            return [f"{what} ('{named}' in its config.json)"]
    return []
