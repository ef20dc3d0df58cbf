"""Read state dicts that `torch.save` wrote, without running code, and convert those of checkpoint folders once."""

from __future__ import annotations

import re
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from featcal.formats.output import stream_tensors
from featcal.formats.weights import TensorInfo, knows_dtype
from featcal.system.atomic_files import put
from featcal.system.errors import InputError
from featcal.system.fingerprints import json_digest, sha256, stamps
from featcal.system.formatting import printable, some
from featcal.system.paths import require_plain
from featcal.system.resources import cache_folder

PICKLED_FILE = "pytorch_model.bin"
PICKLED_INDEX = f"{PICKLED_FILE}.index.json"
PICKLED_ENDINGS = (".bin", ".pt", ".pth")
_TRAINING = ("state_dict", "model_state_dict", "model")
"""Keys under which training scripts keep a state dict."""
_TRAINED_PREFIXES = ("module.", "_orig_mod.")
"""Prefixes that distributed training and torch.compile add to every name."""
_COPIES = 4
"""Largest number of times that a tensor may occur in a file: T5's embedding has four names."""


def select_pickled(names: Iterable[str]) -> list[str]:
    """Return the file names that are pickled weights: those that begin with "pytorch_model" if any do, since the others
    are then states of a training run."""
    found = sorted(name for name in names if name.endswith(PICKLED_ENDINGS))
    return [name for name in found if name.startswith("pytorch_model")] or found


def convert_once(file: Path, label: str) -> Path:
    """Convert a pickled state dict to a safetensors file in the user's cache folder, once.

    The key is the hash of the pickle's content, so a copy in another place finds the same file. Memory holds at most as
    many tensors as `stream_tensors` loads at once, except for files written by a torch before 1.6, which cannot be
    mapped.

    Raises:
        InputError: the file is damaged, contains other objects than tensors in plain containers, or the cache cannot be
            written.
    """
    kept = cache_folder() / "converted"
    # What the pickle is now, so that it is hashed once and not at every start.
    known = kept / f"{json_digest(list(stamps(file)))}.sha256"
    try:
        kept.mkdir(parents=True, exist_ok=True)
        if not known.is_file():
            put(known, sha256(file))
        target = kept / f"{known.read_text(encoding='utf-8')}.safetensors"
        if not target.is_file():
            tensors = read_pickle(file, label)
            put(target, lambda place: _write(tensors, place, f"{label}: converting {file.name}"))
    except OSError as error:
        raise InputError(
            f"{label}: {file} cannot be converted to {kept}: {error.strerror}; set FEATCAL_CACHE to a folder that can "
            "be written and has room for it"
        ) from error
    return target


def _write(tensors: Mapping[str, Tensor], place: Path, title: str) -> None:
    info = {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    total = sum(one.nbytes for one in info.values())
    with tqdm(total=total, desc=title, unit="B", unit_scale=True, delay=1, leave=False, disable=None) as bar:

        def read(names: Iterable[str]) -> dict[str, Tensor]:
            group = {name: tensors[name] for name in names}
            bar.update(sum(tensor.nbytes for tensor in group.values()))
            return group

        try:
            stream_tensors(info, read, place)
        except InputError as error:  # of the disk, for which `convert_once` says what helps
            if isinstance(error.__cause__, OSError):
                raise error.__cause__ from None
            raise


def read_pickle(file: Path, label: str) -> dict[str, Tensor]:
    """Return all tensors of a `torch.save` file by stored name, mapped but not read; those of a training checkpoint
    without the prefixes of training. Other objects are left out.

    Raises:
        InputError: the file is damaged, or contains other objects than tensors in plain containers, which could run
            code.
    """
    require_plain(file, f"{label}: {file}")
    content = _load(file, label)
    for wrapper in _TRAINING:
        if isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
    tensors = {
        name: value
        for name, value in content.items()
        if isinstance(name, str) and isinstance(value, Tensor) and name != "__metadata__"
    }
    if not tensors:
        entries = some([_describe_entry(name, value) for name, value in content.items()]) or "it is empty"
        raise InputError(f"{label}: {file} is not a state dict of tensors ({entries})")
    _check_values(tensors, file, label)
    for prefix in _TRAINED_PREFIXES:
        if all(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return tensors


def _describe_entry(name: object, value: object) -> str:
    if isinstance(name, str):
        return f"'{printable(name, 80)}' is {type(value).__name__}"
    return f"{type(name).__name__} as the name of a tensor"


def _load(file: Path, label: str) -> Mapping[str, Any]:
    """Return the content of a pickle of tensors and plain containers."""
    scripted, odd = False, False
    try:
        if mapped := zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                members = archive.infolist()
            scripted = any(one.filename.endswith("constants.pkl") for one in members)
            # torch compresses nothing; what unpacks to more than the file holds could fill the memory.
            odd = any(one.compress_type != zipfile.ZIP_STORED for one in members)
        content = None
        if not (scripted or odd):
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # a damaged archive or pickle can raise anything
        content, reason = None, _explain(error)
    else:
        reason = "a TorchScript archive" if scripted else f"a {'compressed archive' if odd else type(content).__name__}"
    if not isinstance(content, Mapping):
        raise InputError(
            f"{label}: {file} is damaged or not a plain state dict ({reason}). Fetch it again. A pickled object can "
            "run code when it is loaded, so featcal reads tensors in plain containers alone; where you trust the file, "
            "load it with the software that wrote it and save model.state_dict() as safetensors"
        )
    return content


def _explain(error: Exception) -> str:
    """Explain why torch did not load a pickle, naming a type that is neither a tensor nor a plain container."""
    text = str(error)
    if found := re.search(r"GLOBAL (\S+)", text):
        return f"it holds {printable(found[1].rstrip('.'), 120)}"
    return f"torch says: {printable(text.split('. ')[0], 300) or type(error).__name__}"


def _check_values(tensors: Mapping[str, Tensor], file: Path, label: str) -> None:
    """Check that the file contains the values of all tensors.

    Raises:
        InputError: a tensor is not dense or has a dtype that safetensors does not have, no member of the archive is as
            long as its values, or all of them together are longer than the file by more than tied names explain.
    """
    odd = next((n for n, t in tensors.items() if t.layout != torch.strided or t.device.type == "meta"), None)
    if odd is not None:
        raise InputError(f"{label}: {file} is damaged ('{printable(odd, 80)}' has no dense values); fetch it again")
    if unknown := next((n for n, t in tensors.items() if t.is_quantized or not knows_dtype(t.dtype)), None):
        what = f"tensor '{printable(unknown, 80)}' has dtype {tensors[unknown].dtype}"
        raise InputError(f"{label}: {file}: {what}, which featcal does not read")
    values = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors.values()}
    left: Counter[int] = Counter(values.values())
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            # torch maps values from wherever the pickle points to, in a damaged file beyond their own member of the
            # archive.
            left = Counter(one.file_size for one in archive.infolist())
    short = sum((Counter(values.values()) - left).values())
    if short or sum(t.nbytes for t in tensors.values()) > _COPIES * file.stat().st_size:
        what = f"values of {short} tensors are not whole" if short else "its tensors are larger than the file"
        raise InputError(f"{label}: {file} is damaged ({what}); fetch it again")
