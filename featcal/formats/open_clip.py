"""Where open_clip models lie and how they are read: folders, single state dicts, preprocessing."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from featcal.errors import InputError
from featcal.formats.checkpoint import resolve
from featcal.formats.quick_gelu import check_activation
from featcal.formats.weights import TensorInfo, check_finite
from featcal.jsons import read_json
from featcal.models.open_clip import check_plain, weight_name
from featcal.paths import local_path
from featcal.words import did_you_mean

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from featcal.formats.locate import Located

FILE_PREFIX, FOLDER_PREFIX, HUB_PREFIX = "open_clip:", "local-dir:", "hf-hub:"
CONFIG_FILE = "open_clip_config.json"
WEIGHT_FILE = "open_clip_model.safetensors"
_WEIGHT_FILES = (WEIGHT_FILE, "open_clip_pytorch_model.safetensors")
_WRAPPERS = ("module.", "_orig_mod.", "model.")
"""Prefixes that training leaves on every name."""
_PREPROCESS_KEYS = ("mean", "std", "interpolation", "resize_mode", "fill_color")


class StateFile:
    """A state dict in one file, mapped from disk: a tensor's values are read when they are used.

    Args:
        file: `.safetensors`, or what `torch.save` wrote of a state dict.
        label: what the model is called in messages.
        canonical: stored name → canonical name; None leaves the tensor out.

    Raises:
        InputError: unreadable, not a state dict, or two tensors with one canonical name.
    """

    def __init__(self, file: Path, label: str, canonical: Callable[[str], str | None]) -> None:
        self.label = label
        self.files = [file]
        self.left_out: dict[str, Path] = {}
        self._stored = state_dict(file, label)
        self._names: dict[str, str] = {}
        for stored in self._stored:
            name = canonical(stored)
            if name is None:
                self.left_out[stored] = file
            elif name in self._names:
                raise InputError(f"{label}: both '{self._names[name]}' and '{stored}' mean '{name}' ({file})")
            else:
                self._names[name] = stored

    @property
    def info(self) -> Mapping[str, TensorInfo]:
        tensors = ((name, self._stored[stored]) for name, stored in self._names.items())
        return {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        read = {}
        for name in names:
            if name not in self._names:
                raise InputError(f"{self.label}: tensor '{name}' is missing from {self.files[0]}")
            tensor = self._stored[self._names[name]]
            check_finite(tensor, f"{self.label}: tensor '{name}' in {self.files[0]}")
            read[name] = tensor
        return read

    def repeats(self, stored: str, name: str) -> bool:
        return torch.equal(self._stored[stored], self.read([name])[name])


def locate_open_clip(ref: str, root: Path, label: str) -> Located:
    """Find an open_clip model.

    Args:
        ref: `open_clip:ARCH:FILE` (a state dict of an architecture that open_clip names, or of the one that an
            `open_clip_config.json` describes), `local-dir:FOLDER` or `hf-hub:OWNER/NAME`; paths relative to `root`.

    Raises:
        InputError: nothing is there, it cannot be read, or its weights need another activation than it says.
    """
    if not ref.startswith(FILE_PREFIX):
        prefix = FOLDER_PREFIX if ref.startswith(FOLDER_PREFIX) else HUB_PREFIX
        identifier = ref.removeprefix(prefix)
        located = located_folder(resolve(identifier, root, label), label)
        check_activation(located, identifier.partition("@")[0])
        return located
    arch, separator, path = ref.removeprefix(FILE_PREFIX).partition(":")
    if not (arch and separator and path):
        raise InputError(f"{label}: '{ref}' is not open_clip:ARCH:FILE, such as open_clip:ViT-B-32-quickgelu:cars.pt")
    file = local_path(path, root, label).resolve()
    if not file.is_file():
        raise InputError(f"{label}: no file {file}")
    if arch.endswith(".json"):
        config = _read_config(local_path(arch, root, label).resolve(), label)
    else:
        config = {"model_cfg": _architecture(arch, label), "preprocess_cfg": {}, "arch": arch}
    located = _located(file, {"model_type": "open_clip", **config}, label)
    check_activation(located, file.name)
    return located


def is_open_clip_folder(folder: Path) -> bool:
    """Whether a folder is an open_clip model and not (also) one that transformers reads."""
    if not (folder / CONFIG_FILE).is_file():
        return False
    try:
        return "model_type" not in read_json(folder / "config.json")
    except InputError:
        return True


def located_folder(folder: Path, label: str) -> Located:
    """The open_clip model in a folder with `open_clip_config.json` and safetensors.

    Raises:
        InputError: one of them is missing or cannot be read; says how to convert pickled weights.
    """
    config = _read_config(folder / CONFIG_FILE, label)
    for name in _WEIGHT_FILES:
        if (folder / name).is_file():
            return _located(folder / name, {"model_type": "open_clip", **config}, label)
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
    if pickles:
        raise InputError(
            f"{label}: {folder} holds only pickled weights ({', '.join(pickles)}); rewrite them with "
            f"'featcal convert open_clip:{folder / CONFIG_FILE}:{folder / pickles[0]} --format open_clip --out DIR', "
            "which reads tensors and runs no code"
        )
    raise InputError(f"{label}: no {WEIGHT_FILE} in {folder}")


def _located(file: Path, config: Mapping[str, Any], label: str) -> Located:
    from featcal.formats.locate import Located

    names = list(state_dict(file, label))
    return Located(label, file.parent, config, names, lambda canonical: StateFile(file, label, canonical))


def _read_config(file: Path, label: str) -> dict[str, Any]:
    content = read_json(file, f"{label}: {file}", f"{label}: {file} cannot be read; is it an open_clip model?")
    model_cfg = content.get("model_cfg")
    parts = [model_cfg.get(part) for part in ("vision_cfg", "text_cfg")] if isinstance(model_cfg, dict) else []
    if not (len(parts) == 2 and all(isinstance(part, dict) for part in parts)):
        raise InputError(f"{label}: {file} has no 'model_cfg' with 'vision_cfg' and 'text_cfg'")
    return {"model_cfg": model_cfg, "preprocess_cfg": content.get("preprocess_cfg") or {}}


def _architecture(arch: str, label: str) -> dict[str, Any]:
    import open_clip

    config: dict[str, Any] | None = open_clip.get_model_config(arch.replace("/", "-"))
    if config is None:
        hint = did_you_mean(arch, open_clip.list_models())
        raise InputError(f"{label}: open_clip has no architecture '{arch}'.{hint}")
    return config


def state_dict(file: Path, label: str) -> dict[str, Tensor]:
    """All tensors of a file by stored name, mapped and not read; training's wrappers and prefixes are taken off.

    Raises:
        InputError: the file is damaged, or holds pickled objects, which could run code.
    """
    content = _load_safetensors(file, label) if file.suffix == ".safetensors" else _load_torch(file, label)
    for wrapper in ("state_dict", "model_state_dict", "model"):
        if isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
    foreign = [name for name, value in content.items() if not isinstance(value, Tensor)]
    if foreign or not content:
        what = f"'{foreign[0]}' is {type(content[foreign[0]]).__name__}" if foreign else "it is empty"
        raise InputError(f"{label}: {file} is not a state dict of tensors ({what})")
    for prefix in _WRAPPERS:
        if all(name.startswith(prefix) for name in content):
            content = {name.removeprefix(prefix): tensor for name, tensor in content.items()}
    if "class_embedding" in content:  # an image tower alone
        content = {f"visual.{name}": tensor for name, tensor in content.items()}
    return dict(content)


def _load_safetensors(file: Path, label: str) -> Mapping[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors: dict[str, Tensor] = load_file(file)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{label}: {file} is not a whole safetensors file ({error}); fetch it again") from error
    return tensors


def _load_torch(file: Path, label: str) -> Mapping[str, Any]:
    if not zipfile.is_zipfile(file):
        raise InputError(
            f"{label}: {file} is damaged, or written by a torch before 1.6; fetch it again, or load it where you "
            "trust it and save its state dict as safetensors"
        )
    with zipfile.ZipFile(file) as archive:
        scripted = any(name.endswith("constants.pkl") for name in archive.namelist())
    try:
        content = None if scripted else torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        content, reason = None, f"torch says: {str(error).split('. ')[0]}"
    else:
        reason = "a TorchScript archive" if scripted else f"a {type(content).__name__}"
    if not isinstance(content, Mapping):
        raise InputError(
            f"{label}: {file} is no plain state dict ({reason}). A pickled module can run code when it is loaded; "
            "where you trust it, load it with the software that wrote it and save model.state_dict() as safetensors"
        )
    return content


def open_clip_preprocess(config: Mapping[str, Any]) -> Callable[[Sequence[NDArray[Any]]], Tensor]:
    """Pictures (uint8 `[H, W, 3]`) → `pixel_values` `[n, 3, H, W]` float32 by open_clip's own evaluation transform.

    Args:
        config: of a located open_clip model; what `preprocess_cfg` leaves out is open_clip's default.
    """
    from open_clip.transform import PreprocessCfg, image_transform_v2

    size = config["model_cfg"]["vision_cfg"].get("image_size", 224)
    transform = image_transform_v2(PreprocessCfg(**preprocess_settings(config), size=size), is_train=False)

    def prepare(images: Sequence[NDArray[Any]]) -> Tensor:
        from PIL import Image

        return torch.stack([transform(Image.fromarray(image)) for image in images])

    return prepare


def preprocess_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """mean, std, interpolation, resize_mode and fill_color, complete."""
    from dataclasses import asdict

    from open_clip.transform import PreprocessCfg

    given = {key: value for key, value in config["preprocess_cfg"].items() if value is not None}
    whole = asdict(PreprocessCfg()) | given
    return {key: whole[key] for key in _PREPROCESS_KEYS}


def library_model(located: Located) -> Any:
    """The whole model in open_clip's own class, float32 and in eval mode; every tensor comes from the file.

    Raises:
        InputError: tensors are missing (an image tower alone has no text), or have other shapes.
    """
    from open_clip.model import CLIP, CustomTextCLIP

    model_cfg = {key: value for key, value in located.config["model_cfg"].items() if key != "custom_text"}
    check_plain(model_cfg)
    tensors = located.open(weight_name)
    state = tensors.read(tensors.info)
    model = (CustomTextCLIP if "text.positional_embedding" in state else CLIP)(**model_cfg).eval()
    if "logit_scale" in state:
        state["logit_scale"] = state["logit_scale"].reshape(model.logit_scale.shape)
    try:
        model.load_state_dict(state, strict=True)
    except RuntimeError as error:
        what = " ".join(str(error).split())[:300]
        raise InputError(f"{located.label}: not a whole open_clip model with both towers: {what}") from error
    return model.float()


def load_folder(folder: Path) -> Any:
    """The model of a folder as open_clip's users load it, float32 and in eval mode."""
    import open_clip

    return open_clip.create_model(f"{FOLDER_PREFIX}{folder}", precision="fp32").eval()


def tokenizer(located: Located) -> Callable[[list[str]], Tensor]:
    """open_clip's tokenizer of a model: texts → token ids `[n, context]`.

    Raises:
        InputError: the model needs tokenizer files that are not there, or ids that its vocabulary does not have.
    """
    from open_clip.tokenizer import HFTokenizer, SimpleTokenizer

    text_cfg = located.config["model_cfg"]["text_cfg"]
    options = {"context_length": text_cfg.get("context_length", 77), **(text_cfg.get("tokenizer_kwargs") or {})}
    name = text_cfg.get("hf_tokenizer_name")
    if not name:
        own = SimpleTokenizer(**options)
        rows = text_cfg.get("vocab_size", own.vocab_size)
        if rows < own.vocab_size:
            raise InputError(
                f"{located.label}: a vocabulary of {rows} rows is not CLIP's ({own.vocab_size}); class prompts need a "
                "tokenizer in the folder and text_cfg.hf_tokenizer_name"
            )
        return cast(Callable[[list[str]], Tensor], own)
    in_folder = any((located.folder / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json"))
    source = located.folder if in_folder else name
    try:
        return cast(
            Callable[[list[str]], Tensor],
            HFTokenizer(str(source), tokenizer_mode=text_cfg.get("tokenizer_mode"), **options),
        )
    except (OSError, ValueError) as error:
        raise InputError(f"{located.label}: no usable tokenizer in {source}, which class prompts need") from error
