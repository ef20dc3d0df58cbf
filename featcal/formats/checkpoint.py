"""A checkpoint folder in the Hub's layout, read one tensor at a time from its safetensors files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from featcal.formats.hub import fetch_model, hub_model
from featcal.formats.weights import ANOTHER_FILE, TensorInfo, check_finite
from featcal.system.errors import InputError
from featcal.system.json_files import read_json
from featcal.system.paths import local_path, require_plain
from featcal.system.sandbox import require_links_inside, require_no_hub

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MOST_DIMENSIONS = 8
"""Of a tensor; weights have four at most."""
Header = dict[str, tuple[tuple[int, ...], str]]
"""Shape and dtype code of every tensor of a file, by stored name."""
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


class Checkpoint:
    """Tensors of one folder by canonical name. Nothing is read but headers until `read` is called.

    Args:
        folder: holds `model.safetensors`, or shards with `model.safetensors.index.json`, and `config.json`.
        label: what the model is called in messages.
        canonical: file name of a tensor → canonical name; None leaves the tensor out.

    Raises:
        InputError: no safetensors, unreadable header, a shard that the index names but is not there, or two
            tensors with one canonical name.
    """

    def __init__(self, folder: Path, label: str, canonical: Callable[[str], str | None]) -> None:
        self.folder = folder
        self.label = label
        self._places: dict[str, tuple[Path, str]] = {}
        self._info: dict[str, TensorInfo] = {}
        self.leftovers: dict[str, Path] = {}
        """Stored names that mean no tensor of their own, and their files."""
        headers = _headers(folder, label)
        self.files = list(headers)
        for file, header in headers.items():
            for stored, (shape, code) in header.items():
                name = canonical(stored)
                if name is None:
                    self.leftovers[stored] = file
                    continue
                if name in self._places:
                    raise InputError(f"{label}: both '{self._places[name][1]}' and '{stored}' mean '{name}' ({file})")
                if len(shape) > MOST_DIMENSIONS:
                    raise InputError(
                        f"{label}: tensor '{stored}' in {file} has {len(shape)} dimensions; is it damaged?"
                    )
                self._places[name] = (file, stored)
                self._info[name] = TensorInfo(shape, dtype_of(code, f"{label}: tensor '{stored}' in {file}"))

    @property
    def info(self) -> Mapping[str, TensorInfo]:
        return self._info

    @cached_property
    def config(self) -> dict[str, Any]:
        """Content of `config.json`."""
        return read_config(self.folder, self.label)

    def repeats(self, stored: str, name: str) -> bool:
        """Whether a tensor that was left out holds the very values of the tensor `name`."""
        with open_file(self.leftovers[stored], self.label) as handle:
            other: Tensor = handle.get_tensor(stored)
        return torch.equal(other, self.read([name])[name])

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        by_file: dict[Path, list[tuple[str, str]]] = defaultdict(list)
        for name in names:
            if name not in self._places:
                raise InputError(f"{self.label}: tensor '{name}' is missing from {self.folder}")
            file, stored = self._places[name]
            by_file[file].append((name, stored))
        tensors: dict[str, Tensor] = {}
        for file, wanted in by_file.items():
            with open_file(file, self.label) as handle:
                for name, stored in wanted:
                    tensor: Tensor = handle.get_tensor(stored)
                    check_finite(tensor, f"{self.label}: tensor '{stored}' in {file}", ANOTHER_FILE)
                    tensors[name] = tensor
        return tensors


def resolve(ref: str, root: Path, label: str) -> Path:
    """Local folder of a model reference: a folder relative to `root`, or a Hub id, perhaps with a folder inside it
    and a revision (`owner/name/folder@revision`). A path whose first part is a folder here is never an id.

    Raises:
        InputError: neither a folder nor a model that the Hub (or its local cache) has.
    """
    folder = local_path(ref, root, label).resolve()
    if folder.is_dir():
        require_links_inside(folder, label)
        return folder
    inside_known_folder = (root / ref.split("/")[0]).is_dir()
    model = hub_model(ref)
    if inside_known_folder or model is None:
        raise InputError(
            f"{label}: no folder {folder}; give an existing folder or a Hub id such as 'owner/name' or "
            "'owner/name/folder'"
        )
    require_no_hub(label)
    try:
        return fetch_model(model)
    except InputError as error:
        raise InputError(*(f"{label}: no folder {folder}, and {problem}" for problem in error.problems)) from error


def stored_names(folder: Path, label: str) -> list[str]:
    """Names of all tensors of a checkpoint folder as they are stored."""
    return [name for header in _headers(folder, label).values() for name in header]


def dtype_of(code: str, what: str) -> torch.dtype:
    """The dtype that a safetensors header calls `code`; InputError naming `what` if featcal does not read it."""
    if code not in _DTYPES:
        raise InputError(f"{what} has dtype {code}, which featcal does not read")
    return _DTYPES[code]


def code_of(dtype: torch.dtype) -> str:
    """What a safetensors header calls a dtype that featcal reads."""
    return next(code for code, known in _DTYPES.items() if known is dtype)


def read_config(folder: Path, label: str) -> dict[str, Any]:
    """Content of `config.json` of a checkpoint folder."""
    file = folder / "config.json"
    missing = f"{label}: {folder} has no readable config.json; is it a checkpoint folder?"
    return read_json(file, f"{label}: {file}", missing)


def _weight_files(folder: Path, label: str) -> list[Path]:
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    index = folder / INDEX_FILE
    if index.is_file():
        names = shards(read_json(index, f"{label}: {index}"), f"{label}: {index}")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise InputError(f"{label}: {index} names shards that are not there: {', '.join(missing)}")
        return [folder / name for name in names]
    pickles = select_pickled([path.name for path in folder.iterdir()])
    if pickles:
        raise InputError(
            f"{label}: {folder} holds only pickled weights ({', '.join(pickles)}), which can run code; "
            f"{unpickling(folder, pickles)}"
        )
    raise InputError(f"{label}: no {SINGLE_FILE} in {folder}")


def shards(index: Any, what: str) -> list[str]:
    """The files that an index of shards names, which lie beside it; InputError naming `what` if it is none."""
    try:
        names = sorted(set(index["weight_map"].values()))
        if not names or any(Path(name).name != name or len(name) > 255 for name in names):
            raise ValueError("it names files that lie beside it")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise InputError(f"{what} is not a valid index of shards ({error})") from error
    return names


def select_pickled(names: Iterable[str]) -> list[str]:
    """Those of the file names that are pickled weights; states of a training run are none."""
    found = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth")))
    return [name for name in found if name.startswith("pytorch_model")] or found


def unpickling(folder: str | Path, pickles: Sequence[str]) -> str:
    """The command that makes safetensors of pickled state dicts without running code of theirs."""
    steps = [
        "import torch",
        "from safetensors.torch import save_file",
        f"d = '{Path(folder).as_posix()}/'",
        f"parts = [torch.load(d + n, map_location='cpu', weights_only=True) for n in {list(pickles)}]",
        "tensors = {k: v.clone().contiguous() for part in parts for k, v in part.items()}",
        f"save_file(tensors, d + '{SINGLE_FILE}', {{'format': 'pt'}})",
    ]
    return (
        f'convert them, reading tensors only:\n    python -c "{"; ".join(steps)}"\n'
        "or get a copy that was saved with safe_serialization=True"
    )


def _headers(folder: Path, label: str) -> dict[Path, Header]:
    """The header of every weight file; InputError listing every file that cannot be read."""
    headers: dict[Path, Header] = {}
    problems: list[str] = []
    for file in _weight_files(folder, label):
        try:
            headers[file] = read_header(file, label)
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(*problems)
    return headers


def read_header(file: Path, label: str) -> Header:
    """Shape and dtype code of every tensor of a file; InputError as `open_file`."""
    with open_file(file, label) as handle:
        slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 (not a mapping)
        return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}


def open_file(file: Path, label: str) -> Any:
    """A safetensors file, to be used as a context; `label` names the model in errors.

    Raises:
        InputError: no such file, not a plain one, or not whole.
    """
    require_plain(file, f"{label}: {file}")
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError, MemoryError) as error:
        raise InputError(f"{label}: {file} is not a whole safetensors file ({error}); fetch it again") from error
