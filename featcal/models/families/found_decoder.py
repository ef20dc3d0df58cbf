"""Find the facts of a language model that no row describes, by running the library's own class without its blocks.

A run shows where the blocks are, which module is called after the last block, and whether the head on its output gives
the scores. A run does not show which modules of a block are its attention and its MLP, so the resulting row has no
parts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.func import functional_call
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from featcal.models.adapter import Block, Call, capture_call, check_buffers
from featcal.models.capture import capture_inputs, capture_outputs
from featcal.models.families.decoder import adapter_of, fill_buffers
from featcal.models.families.decoder_facts import DecoderFacts
from featcal.models.families.language import random_tokens
from featcal.models.replay import check_replay, imitate_output
from featcal.models.standing_in import standing_in
from featcal.system.errors import InputError
from featcal.system.formatting import some

_ROWS = 64
"""Size of the vocabulary of the small model that is run."""
_SAME = 1e-5
"""Largest relative difference at which scores count as equal."""
_IDLE = ("drop", "initializer", "token_id", "cache", "vocab", "pretraining", "dtype", "tie_")
"""Parts of names of options that do not change the forward, or change it together with a shape."""
_POSITIONS = frozenset(("rope_theta", "rope_scaling", "partial_rotary_factor", "rotary_pct", "rotary_emb_base"))
"""Older names of options that a class reads from `rope_parameters`; files for version 4 have both."""
_CPU = torch.device("cpu")


def find_decoder(config: Mapping[str, Any]) -> DecoderFacts | None:
    """Return the facts of the language model whose class a `config.json` names; None if it names no such class.

    Raises:
        InputError: the model cannot be run block by block from one captured call, or does not end with a norm and a
            linear map without a bias.
    """
    named = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(config.get("model_type")))
    if not isinstance(named, str) or named not in (config.get("architectures") or ()):
        return None
    return _find(json.dumps(config, sort_keys=True, default=str), getattr(transformers, named))


@lru_cache(maxsize=16)
def _find(content: str, model_class: Any) -> DecoderFacts:
    config = json.loads(content)
    found = _describe(_build(model_class, config))
    check_replay(adapter_of(found)(config, (), _CPU), _CPU)
    return found


def _build(model_class: Any, config: Mapping[str, Any]) -> Any:
    """Return the whole model with parameters on meta, its plainest attention, and a small vocabulary."""
    options = model_class.config_class(**config)
    options.vocab_size, options.pad_token_id, options._attn_implementation = _ROWS, None, "eager"
    with torch.device("meta"):
        model = model_class(options)
    if options.tie_word_embeddings:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    fill_buffers(model)
    return check_buffers(model)


def _describe(model: Any) -> DecoderFacts:
    """Return the facts that a run of a model shows."""
    names = {id(module): name for name, module in model.named_modules()}
    table, scorer = model.get_input_embeddings(), model.get_output_embeddings()
    listed, embedding, head = _find_blocks(model), names[id(table)], names[id(scorer)]
    stack, _, blocks = listed.rpartition(".")
    if type(scorer) is not nn.Linear or getattr(scorer, "bias", None) is not None:
        raise InputError(f"its head '{head}' is more than a linear map without a bias")
    norm, in_tuple = _find_norm(model, listed, head)
    if not (embedding.startswith(f"{stack}.") and norm.startswith(f"{stack}.")):
        raise InputError(f"'{embedding}' or '{norm}' is not beside its blocks '{listed}'")
    options = {*model.config.to_dict()} - {*transformers.PreTrainedConfig().to_dict()}
    options -= _POSITIONS if "rope_parameters" in options else set()
    zero, some = torch.zeros(table.weight.shape[1]), torch.ones(1, table.weight.shape[1])
    return DecoderFacts(
        model_type=model.config.model_type,
        config=type(model.config),
        model=type(model),
        parts=(),
        shared=(),
        stack=stack,
        blocks=blocks,
        embedding=embedding.removeprefix(f"{stack}."),
        norm=norm.removeprefix(f"{stack}."),
        norm_offset=float(_run_norm(model.get_submodule(norm), zero, some).any()),
        head=head,
        stored_head=_find_stored_head(model, head),
        settings=tuple(name for name in sorted(options) if not any(part in name for part in _IDLE)),
        dropped=(*DecoderFacts.dropped, *(model._keys_to_ignore_on_load_unexpected or ())),
        in_tuple=in_tuple,
        is_found=True,
    )


def _find_stored_head(model: Any, head: str) -> str:
    """Return the name of the head in files; "" if the class has the same name.

    Raises:
        InputError: files have other tensors or names of tensors than the class.
    """
    own = model.state_dict()
    differing = {*own} ^ {*revert_weight_conversion(model, own)}
    others = differing - {f"{head}.weight"}
    if len(others) > 1 or len(others) == len(differing) > 0:
        raise InputError(f"its files have other tensors than its class ({some(sorted(differing))})")
    return "".join(others).removesuffix(".weight")


def _run_norm(norm: nn.Module, value: Tensor, given: Tensor) -> Tensor:
    """Return the output of a norm with every parameter set to a given value `[width]`."""
    made: Tensor = functional_call(norm, {name: value for name, _ in norm.named_parameters()}, (given,), strict=True)
    return made


def _find_blocks(model: Any) -> str:
    """Return the name of the one list of blocks.

    Raises:
        InputError: there is none or more than one, or its blocks share weights or have weights that are not those of
            linear maps.
    """
    count = model.config.num_hidden_layers
    found: list[str] = []
    for name, module in model.named_modules():
        inside = name.startswith(tuple(f"{one}." for one in found))
        if isinstance(module, nn.ModuleList) and len(module) == count and not inside:
            found.append(name)
    if len(found) != 1 or "." not in found[0]:
        raise InputError(f"it has {len(found)} lists of {count} blocks inside it, expected one")
    parameters = [list(block.parameters()) for block in model.get_submodule(found[0])]
    if len({id(one) for own in parameters for one in own}) < sum(map(len, parameters)):
        raise InputError(f"the blocks '{found[0]}' share weights")
    if any(one.ndim > 2 for own in parameters for one in own):
        raise InputError(f"the blocks '{found[0]}' have weights that are not matrices, such as experts of a mixture")
    return found[0]


def _imitate_block(block: Block, call: Call) -> Any:
    """Return constants of the same form as a block's output.

    Raises:
        InputError: a linear map inside the block gets another input than `[batch, tokens, width]`, or its output is
            changed in place, so that it cannot be captured.
    """
    with capture_inputs(block.linears) as given, capture_outputs(block.linears) as made:
        returned = imitate_output(block, call, _CPU)
    for name, tensor in given.items():
        if tensor.ndim != 3 or made[name]._version:
            why = (
                "is not given [batch, tokens, width]" if tensor.ndim != 3 else "has an output that is changed in place"
            )
            raise InputError(f"'{block.stored_name(name)}' {why}")
    return returned


def _find_norm(model: Any, listed: str, head: str) -> tuple[str, bool]:
    """Return the name of the one module with parameters between the last block and the head, and whether blocks return
    their state in a tuple.

    Raises:
        InputError: a block is not called exactly once with a state `[batch, tokens, width]`, another module runs before
            the head, or the scores are not the head's on the norm's output.
    """
    blocks = [Block(f"{listed}.{i}", one) for i, one in enumerate(model.get_submodule(listed))]
    parameters = {name: one for name, one in model.named_parameters() if not name.startswith(f"{listed}.")}
    generator = torch.Generator().manual_seed(0)
    outer = {name: torch.randn(one.shape, generator=generator) for name, one in parameters.items()}
    ids = random_tokens(_ROWS)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    first = capture_call(model, blocks[0].module, outer, **inputs)
    if not first.args or first.hidden_state.ndim != 3:
        raise InputError(f"'{blocks[0].name}' is not called with a state [batch, tokens, width] first")
    last, given = torch.randn(first.hidden_state.shape, generator=generator), _imitate_block(blocks[0], first)
    called: list[tuple[str, Tensor, Tensor]] = []

    def note(name: str, args: tuple[Any, ...], made: Any) -> None:
        if len(seen) == len(blocks) and name != head:
            called.append((name, args[0], made))

    with standing_in(blocks, (last, *given[1:]) if isinstance(given, tuple) else last) as seen:
        outside = [one for one in model.named_modules() if not one[0].startswith(f"{listed}.")]
        for name, module in outside:
            if [*module.parameters(recurse=False)]:
                module.register_forward_hook(lambda _, args, made, name=name: note(name, args, made))
        buffers = dict(model.named_buffers())
        logits = functional_call(model, {**dict(model.named_parameters()), **buffers, **outer}, (), inputs).logits
    if len(seen) != len(blocks):
        raise InputError(f"its {len(blocks)} blocks are called {len(seen)} times in all, expected once each")
    if len(called) != 1 or any(one.ndim > 1 for one in model.get_submodule(called[0][0]).parameters()):
        raise InputError(
            f"after its blocks it runs {' and '.join(c[0] for c in called) or 'nothing'}, expected one norm"
        )
    name, entering, normed = called[0]
    # A tied head has no tensor of its own.
    scored = model.get_output_embeddings()
    weight = next(outer[name] for name, one in model.named_parameters() if one is scored.weight)
    expected = nn.functional.linear(normed, weight)
    if not entering.equal(last) or (logits - expected).norm() > _SAME * expected.norm():
        raise InputError(f"its scores are not those of '{head}' on what '{name}' gives for the last state")
    return name, isinstance(given, tuple)
