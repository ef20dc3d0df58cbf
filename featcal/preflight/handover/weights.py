"""Check names, dtypes and heads of stored weights for programs that read them without transformers."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec

import torch

from featcal.formats.checkpoint import open_file
from featcal.formats.located_model import explain_model_errors
from featcal.preflight.handover.folder import CONFIG, LABEL, Folder, Obstacle
from featcal.preflight.handover.runtimes import OUT_TYPES
from featcal.system.formatting import some

HEAD = "lm_head.weight"
_BUFFERS = ("position_ids", "inv_freq", "attn.bias", "masked_bias")
"""Endings of stored buffers that carry no information, which converters leave out."""
_LEFTOVERS = {
    "base_model.model.": "an adapter's wrapper of peft",
    "_orig_mod.": "torch.compile",
    "module.": "a wrapper for several GPUs",
}
"""Prefixes that wrappers add to names of tensors, and the wrapper of each."""
_IN_A_WRAPPER = ("language_model.", "model.language_model.", "vision_tower.", "model.vision_tower.", "visual.")
"""Prefixes of names in models of pictures and text; a separate text model has other names."""


def check_names(folder: Folder) -> Iterator[Obstacle]:
    """Yield names of tensors that do not belong to the configuration's class."""
    names = list(folder.tensors)
    for start, whose in _LEFTOVERS.items():
        found = [name for name in names if name.startswith(start)]
        if found:
            yield Obstacle(
                "names", f"{len(found)} tensors begin with '{start}', which {whose} leaves; save the model without it"
            )
    found = [name for name in names if name.startswith(_IN_A_WRAPPER)]
    if found and folder.model_class.endswith("ForCausalLM"):
        yield Obstacle(
            "names",
            f"{CONFIG} names {folder.model_class}, a model of text alone, but {len(found)} tensors are called as in a "
            f"model of pictures and text ({some(found, 1)}): save the text model by itself, or name its whole class",
        )
    pictured = any(part in name for name in names for part in ("vision", "visual", "image"))
    if "vision_config" in folder.config and names and not pictured:
        yield Obstacle(
            "names",
            f"{CONFIG} has a vision tower, the weights have none; take the text model's own configuration "
            "('text_config') and class",
        )


def check_dtypes(folder: Folder, target: str) -> Iterator[Obstacle]:
    """Yield weights in dtypes that the program's converter cannot read directly."""
    if "quantization_config" in folder.config:
        if target != "vllm":
            yield Obstacle(
                "dtype",
                f"the weights are packed ('quantization_config' in {CONFIG}); hand on the folder that was calibrated "
                "without --quantize, and let the program pack it",
            )
        return
    wrong = {n: code for n, (_, code) in folder.tensors.items() if code not in OUT_TYPES and not n.endswith(_BUFFERS)}
    if wrong:
        kinds = ", ".join(sorted(set(wrong.values())))
        yield Obstacle(
            "dtype", f"{len(wrong)} tensors are stored in {kinds} ({some(list(wrong), 2)}); write BF16, F16 or F32"
        )


def check_head(folder: Folder) -> Iterator[Obstacle]:
    """Yield contradictions between the head and `tie_word_embeddings`; programs use one or the other."""
    if not folder.generates or not folder.rows:
        return
    tied, stored = is_tied(folder), [name for name in folder.tensors if name.endswith(HEAD)]
    if not tied and not stored:
        yield Obstacle(
            "head",
            f"{CONFIG} says that the head is not tied to the embedding, but there is no {HEAD}: llama.cpp would tie "
            "it, vLLM would refuse; set tie_word_embeddings, or write the folder again",
        )
    if tied and stored and not repeats_embedding(folder, stored[0]):
        yield Obstacle(
            "head",
            f"{CONFIG} ties the head to the embedding, but {stored[0]} has other values: transformers and vLLM would "
            "leave them out, llama.cpp would use them; set tie_word_embeddings to false, or remove the tensor",
        )


def is_tied(folder: Folder) -> bool:
    """Say whether the head is the embedding, by the configuration or by the default of its class.

    Raises:
        InputError: the configuration describes no model.
    """
    stated = folder.config.get("tie_word_embeddings")
    if stated is None:
        from transformers import CONFIG_MAPPING

        kind = str(folder.config.get("model_type"))
        if kind not in CONFIG_MAPPING:
            return False
        with explain_model_errors(LABEL, CONFIG):
            stated = CONFIG_MAPPING[kind](**folder.config).tie_word_embeddings
    return bool(stated)


def repeats_embedding(folder: Folder, head: str) -> bool:
    """Say whether a stored head has the values of the token embedding."""
    embedding = folder.embedding
    if not embedding or folder.tensors[embedding] != folder.tensors[head]:
        return False
    with open_file(folder.place(embedding), LABEL) as a, open_file(folder.place(head), LABEL) as b:
        return torch.equal(a.get_tensor(embedding), b.get_tensor(head))


def note_unmapped(folder: Folder) -> Iterator[str]:
    """Yield notes of the package `gguf` on the names, if it is installed."""
    own = folder.support.gguf
    if not own or "quantization_config" in folder.config or find_spec("gguf") is None:
        return
    import gguf

    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    installed = f"the installed gguf {version('gguf')}"
    if own not in kinds:
        yield f"{installed} has no architecture '{own}'; a newer one may"
        return
    layers = [folder.config.get(one) for one in ("num_hidden_layers", "num_layers", "n_layer")]
    table = gguf.get_tensor_name_map(kinds[own], next((one for one in layers if isinstance(one, int)), 0))
    left = [
        name
        for name in folder.tensors
        if not name.endswith(_BUFFERS) and table.get_name(name, try_suffixes=(".weight", ".bias")) is None
    ]
    if left:
        yield (
            f"{installed} has no name for {len(left)} of {len(folder.tensors)} tensors ({some(left, 2)}): the "
            "converter must know them by itself"
        )
