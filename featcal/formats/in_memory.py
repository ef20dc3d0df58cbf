"""Hold models of transformers in memory: their tensors under the names in files, and the files beside a checkpoint's
weights."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any
from weakref import WeakValueDictionary, finalize

import torch
from torch import Tensor

from featcal.formats.checkpoint import read_config
from featcal.formats.contents import tensor_digest
from featcal.formats.located_model import Located
from featcal.formats.weights import Canonical, TensorInfo, check_finite
from featcal.system.errors import InputError
from featcal.system.formatting import shorten
from featcal.system.in_memory import find_held

_TOOLS = "Suite.of takes tokenizer= and processor="


class HeldModel:
    """A model in memory, with the tools that prepare its samples.

    Its tensors are those of the module, not copies. The files that a checkpoint has beside its weights are in a
    temporary folder as long as the object lives.

    Args:
        model: a `PreTrainedModel`.
        label: its name in messages.
        tools: tokenizers and processors of transformers.

    Raises:
        InputError: the object is not such a model, or its tensors are quantised, offloaded or belong to adapters.
    """

    def __init__(self, model: Any, label: str, tools: Iterable[Any] = ()) -> None:
        _require_model(model, label)
        self.kind = type(model).__name__
        self.tensors: Mapping[str, Tensor] = _stored_tensors(model, label)
        self.folder = Path(mkdtemp(prefix="featcal-in-memory-"))
        finalize(self, rmtree, self.folder, ignore_errors=True)
        _write_beside(model, tools, self.folder, label)
        self.content = self.tensors_digest()
        digest = hashlib.sha256(self.content.encode())
        for file in sorted(self.folder.rglob("*")):
            if file.is_file():
                digest.update(f"{file.relative_to(self.folder).as_posix()}\n".encode() + file.read_bytes())
        self.sha256 = digest.hexdigest()
        _by_folder[self.folder] = self

    def tensors_digest(self) -> str:
        """Return the SHA-256 of the lines `NAME DIGEST`, one for every tensor in the order of names, with each digest
        as `tensor_digest` gives it; a saved copy of the model has the same."""
        lines = (f"{name} {tensor_digest(tensor)}\n" for name, tensor in sorted(self.tensors.items()))
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def is_unchanged(self) -> bool:
        """Say whether every tensor is the same as when the object was made."""
        return self.tensors_digest() == self.content


@dataclass(frozen=True)
class HeldWeights:
    """The tensors of a model in memory by canonical name."""

    label: str
    held: HeldModel
    names: Mapping[str, str]
    """Canonical name → name in files."""
    leftovers: Mapping[str, Path]
    files: Sequence[Path] = ()

    @property
    def info(self) -> Mapping[str, TensorInfo]:
        found = {name: self.held.tensors[stored] for name, stored in self.names.items()}
        return {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in found.items()}

    def repeats(self, stored: str, name: str) -> bool:
        return torch.equal(self.held.tensors[stored], self.held.tensors[self.names[name]])

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name in names:
            if name not in self.names:
                raise InputError(f"{self.label}: tensor '{name}' is missing from the {self.held.kind} in memory")
            tensor = self.held.tensors[self.names[name]]
            check_finite(tensor, f"{self.label}: tensor '{self.names[name]}'", "train the model again, or give another")
            found[name] = tensor.cpu().contiguous()
        return found


@dataclass(frozen=True)
class HeldLocated(Located):
    """A model in memory, found by its reference."""

    kind: str = field(default="", kw_only=True)

    @property
    def config_source(self) -> str:
        return f"the configuration of the {self.kind} in memory"


def locate_held(reference: str, label: str) -> HeldLocated:
    """Find the model in memory that a reference names.

    Raises:
        InputError: the object no longer exists, was changed, or is not a model but samples.
    """
    model = find_held(reference, label)
    if not isinstance(model, HeldModel):
        raise InputError(f"{label}: '{reference}' names samples, not a model")

    def open_tensors(canonical: Canonical, aliases: Mapping[str, str]) -> HeldWeights:
        names: dict[str, str] = {}
        leftovers: dict[str, Path] = {}
        for stored in model.tensors:
            name = canonical(stored)
            if name is None:
                leftovers[stored] = model.folder
            elif name in names:
                raise InputError(f"{label}: both '{names[name]}' and '{stored}' mean '{name}' in the {model.kind}")
            else:
                names[name] = stored
        return HeldWeights(label, model, names, leftovers)

    config = read_config(model.folder, label)
    return HeldLocated(label, model.folder, config, list(model.tensors), open_tensors, kind=model.kind)


_by_folder: WeakValueDictionary[Path, HeldModel] = WeakValueDictionary()


def model_beside(folder: Path) -> HeldModel | None:
    """Return the model in memory to which a folder belongs; None for the folder of a checkpoint."""
    return _by_folder.get(folder)


def name_place(folder: Path) -> str:
    """Return the name of a model's folder in messages: its path, or the model in memory that it belongs to.

    >>> name_place(Path("models/base"))
    'models/base'
    """
    model = model_beside(folder)
    return str(folder) if model is None else f"the {model.kind} in memory ({_TOOLS})"


def _require_model(model: Any, label: str) -> None:
    from transformers import PreTrainedModel

    kind, what = type(model).__name__, ""
    if hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False):
        what = f"a {kind} with adapters; give what its merge_and_unload() returns, or its folders as 'BASE+ADAPTER'"
    elif isinstance(model, Mapping):
        what = f"a {kind} of tensors, which does not say its architecture; give the model itself"
    elif not isinstance(model, PreTrainedModel):
        what = f"a {kind}; give a PreTrainedModel of transformers, a folder or an id on the Hub"
    elif getattr(model, "hf_quantizer", None) is not None or getattr(model, "is_quantized", False):
        what = f"a quantised {kind}; give the model that it was quantised from"
    elif elsewhere := [name for name, one in model.state_dict().items() if one.device.type == "meta"]:
        what = f"a {kind} whose weights are not in memory ('{elsewhere[0]}' is on the meta device); load it whole"
    if what:
        raise InputError(f"{label}: {what}")


def _stored_tensors(model: Any, label: str) -> dict[str, Tensor]:
    """Return the tensors that `save_pretrained` would write, without writing or copying them: names in files differ
    from names in modules, and tied tensors are in a file once."""
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    ignored = set(model._keys_to_ignore_on_save or ())
    found = {name: tensor for name, tensor in model.state_dict().items() if name not in ignored}
    try:
        found = revert_weight_conversion(model, remove_tied_weights_from_state_dict(found, model))
    except (RuntimeError, ValueError) as error:
        why = " ".join(str(error).split())
        raise InputError(f"{label}: transformers could not save this {type(model).__name__} ({why})") from error
    return {name: tensor.detach() for name, tensor in found.items()}


def _write_beside(model: Any, tools: Iterable[Any], folder: Path, label: str) -> None:
    """Write all files that `save_pretrained` of the model and of its tools would write, except weights.

    Raises:
        InputError: a tool is not one of transformers, or transformers refuses to save the generation settings.
    """
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        try:
            model.generation_config.save_pretrained(folder)
        except ValueError as error:
            why = shorten(" ".join(str(error).split()), 200)
            raise InputError(f"{label}: its generation_config contradicts itself ({why}); correct it") from error
    for tool in tools:
        if not hasattr(tool, "save_pretrained") or hasattr(tool, "state_dict"):
            raise InputError(f"{label}: a {type(tool).__name__} is not a tokenizer or processor of transformers")
        tool.save_pretrained(folder)
