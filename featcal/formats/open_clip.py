"""Find and read open_clip models: folders, single state dicts, preprocessing and tokenizers."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from featcal.formats.checkpoint import local_folder
from featcal.formats.located_model import Layout, Located, PicturePreprocessing, explain_model_errors
from featcal.formats.open_clip_config import (
    CONFIG_FILE,
    FILE_PREFIX,
    FOLDER_PREFIX,
    HUB_PREFIX,
    check_plain,
    named_architecture,
    preprocess_settings,
    read_open_clip_config,
    weight_name,
)
from featcal.formats.quick_gelu import activation_note, check_activation
from featcal.formats.state_file import StateFile, state_dict
from featcal.formats.weights import Canonical
from featcal.system.errors import InputError, NoScores
from featcal.system.extras import require_packages
from featcal.system.json_files import read_json
from featcal.system.paths import local_path

WEIGHT_FILE = "open_clip_model.safetensors"
_WEIGHT_FILES = (WEIGHT_FILE, "open_clip_pytorch_model.safetensors", "open_clip_pytorch_model.bin")


@dataclass(frozen=True)
class OpenClipModel(Located):
    """A model in open_clip's layout, whose `config` contains `model_cfg` and `preprocess_cfg`."""

    layout: ClassVar[Layout] = "open_clip"

    @property
    def owns_folder(self) -> bool:
        return (self.folder / CONFIG_FILE).is_file()

    @property
    def config_source(self) -> str:
        return f"architecture {self.config['arch']}" if "arch" in self.config else CONFIG_FILE

    def pictures(self) -> PicturePreprocessing:
        """Return open_clip's own evaluation transform."""
        made_by = {"pictures": "open_clip.transform.image_transform_v2", "backend": "pil"}
        return PicturePreprocessing(open_clip_preprocess(self.config), made_by)

    def notes(self) -> list[str]:
        """Return a note if the files do not say which activation the weights were trained with."""
        note = activation_note(self)
        return [] if note is None else [note]


def locate_open_clip(ref: str, root: Path, label: str) -> Located:
    """Find an open_clip model.

    Args:
        ref: `open_clip:ARCH:FILE` (a state dict of an architecture that open_clip names, or that an
            `open_clip_config.json` describes), `local-dir:FOLDER` or `hf-hub:OWNER/NAME`; paths are relative to `root`.

    Raises:
        InputError: there is no model, it cannot be read, or its weights need another activation than it declares.
    """
    if not ref.startswith(FILE_PREFIX):
        prefix = FOLDER_PREFIX if ref.startswith(FOLDER_PREFIX) else HUB_PREFIX
        identifier = ref.removeprefix(prefix)
        return located_folder(local_folder(identifier, root, label), label, identifier)
    arch, separator, path = ref.removeprefix(FILE_PREFIX).partition(":")
    if not (arch and separator and path):
        raise InputError(f"{label}: '{ref}' is not open_clip:ARCH:FILE, such as open_clip:ViT-B-32-quickgelu:cars.pt")
    file = local_path(path, root, label).resolve()
    if not file.is_file():
        raise InputError(f"{label}: no file {file}")
    if arch.endswith(".json"):
        config = read_open_clip_config(local_path(arch, root, label).resolve(), label)
    else:
        config = {"model_cfg": named_architecture(arch, label), "preprocess_cfg": {}, "arch": arch}
    located = _locate(file, config, label)
    check_activation(located, file.name)
    return located


def is_open_clip_folder(folder: Path) -> bool:
    """Say whether a folder holds an open_clip model that transformers cannot read."""
    if not (folder / CONFIG_FILE).is_file():
        return False
    try:
        return "model_type" not in read_json(folder / "config.json")
    except InputError:
        return True


def located_folder(folder: Path, label: str, ref: str) -> Located:
    """Return the open_clip model in a folder with `open_clip_config.json` and safetensors.

    Args:
        ref: the original path or Hub id.

    Raises:
        InputError: one of them is missing or cannot be read (the message says how to convert pickled weights), or the
            weights need another activation than the file says.
    """
    config = read_open_clip_config(folder / CONFIG_FILE, label)
    for name in _WEIGHT_FILES:
        if (folder / name).is_file():
            located = _locate(folder / name, config, label)
            check_activation(located, ref)
            return located
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
    if pickles:
        source = f"{FILE_PREFIX}{folder / CONFIG_FILE}:{folder / pickles[0]}"
        command = shlex.join(["featcal", "export", source, "--format", "open_clip"])
        raise InputError(
            f"{label}: {folder} holds only pickled weights ({', '.join(pickles)}); rewrite them with "
            f"'{command} --out DIR', which reads tensors and runs no code"
        )
    raise InputError(f"{label}: no {WEIGHT_FILE} in {folder}")


def _locate(file: Path, config: Mapping[str, Any], label: str) -> OpenClipModel:
    def open_tensors(canonical: Canonical, aliases: Mapping[str, str]) -> StateFile:
        return StateFile(file, label, canonical)

    whole = {"model_type": "open_clip", **config}
    return OpenClipModel(label, file.parent, whole, list(state_dict(file, label)), open_tensors)


def open_clip_preprocess(config: Mapping[str, Any]) -> Callable[[Sequence[NDArray[np.uint8]]], Tensor]:
    """Return open_clip's evaluation transform: pictures (uint8 `[H, W, 3]`) → `pixel_values` `[n, 3, H, W]` float32.

    Args:
        config: of a located open_clip model; open_clip's defaults fill what `preprocess_cfg` leaves out.
    """
    require_packages("open_clip")
    from open_clip.transform import PreprocessCfg, image_transform_v2

    size = config["model_cfg"]["vision_cfg"].get("image_size", 224)
    transform = image_transform_v2(PreprocessCfg(**preprocess_settings(config), size=size), is_train=False)

    def prepare(images: Sequence[NDArray[np.uint8]]) -> Tensor:
        from PIL import Image

        return torch.stack([transform(Image.fromarray(image)) for image in images])

    return prepare


def open_clip_model(located: Located) -> Any:
    """Return the whole model in open_clip's own class, float32 and in eval mode, every tensor from the file.

    Raises:
        InputError: tensors are missing (an image tower alone has no text), or have other shapes.
    """
    require_packages("open_clip")
    from open_clip.model import CLIP, CustomTextCLIP

    model_cfg = {key: value for key, value in located.config["model_cfg"].items() if key != "custom_text"}
    check_plain(model_cfg)
    tensors = located.open(weight_name, {})
    state = tensors.read(tensors.info)
    with explain_model_errors(located.label, located.config_source):
        model = (CustomTextCLIP if "text.positional_embedding" in state else CLIP)(**model_cfg).eval()
    if "logit_scale" in state:
        # Files hold the scale as a scalar or, with `nonscalar_logit_scale`, as a vector of one.
        state["logit_scale"] = state["logit_scale"].reshape(model.logit_scale.shape)
    try:
        model.load_state_dict(state, strict=True)
    except RuntimeError as error:
        what = " ".join(str(error).split())[:300]
        raise InputError(f"{located.label}: not a whole open_clip model with both towers: {what}") from error
    return model.float()


def load_folder(folder: Path) -> Any:
    """Return the model of a folder as open_clip's users load it, float32 and in eval mode."""
    require_packages("open_clip")
    import open_clip

    return open_clip.create_model(f"{FOLDER_PREFIX}{folder}", precision="fp32").eval()


def tokenizer(located: Located) -> Callable[[list[str]], Tensor]:
    """Return open_clip's tokenizer of a model: texts → token ids `[n, context]`.

    Raises:
        NoScores: tokenizer files are missing, or the model's vocabulary is smaller than the tokenizer's.
        InputError: the files in its folder are damaged.
    """
    require_packages("open_clip")
    from open_clip.tokenizer import HFTokenizer, SimpleTokenizer

    text_cfg = located.config["model_cfg"]["text_cfg"]
    options = {"context_length": text_cfg.get("context_length", 77), **(text_cfg.get("tokenizer_kwargs") or {})}
    name = text_cfg.get("hf_tokenizer_name")
    if not name:
        own = SimpleTokenizer(**options)
        rows = text_cfg.get("vocab_size", own.vocab_size)
        if rows < own.vocab_size:
            raise NoScores(
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
    except Exception as error:  # a damaged file makes the tokenizer's own reader raise anything
        kind = InputError if in_folder else NoScores
        raise kind(f"{located.label}: no usable tokenizer in {source}, which class prompts need ({error})") from error
