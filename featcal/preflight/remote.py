"""Ask the Hub about a model before fetching anything except its config."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from featcal.formats.checkpoint import (
    INDEX_FILE,
    SINGLE_FILE,
    Header,
    shards,
)
from featcal.formats.conversions import explain_training_state
from featcal.formats.hub import RECORD_FILE, HubModel, bar_of, look_up, no_such_folder
from featcal.formats.located_model import Located
from featcal.formats.weights import Canonical, TensorInfo, dtype_of, name_shared
from featcal.system.errors import InputError
from featcal.system.extras import is_installed
from featcal.system.json_files import read_json
from featcal.system.resources import cache_folder


@dataclass(frozen=True)
class Download:
    """Files that a run would download first."""

    ref: str
    kind: str
    """"model" or "data set"."""
    files: int
    bytes: int
    pickled_bytes: int = 0
    """Bytes of pickled weights among them, which are written again as safetensors."""
    copied_bytes: int = 0
    """Bytes that the package `datasets` writes for them, to read rows from."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class RemoteModel:
    """A model on the Hub that is not in the local cache."""

    ref: str
    download: Download
    config: Mapping[str, Any] | None
    """Content of its `config.json`; None for an adapter or another layout."""
    header: Header
    """Shape and dtype code of its tensors, read from the Hub; empty for another layout."""
    adapter: Mapping[str, Any] | None = None
    """Content of its `adapter_config.json`, for a LoRA adapter."""

    def locate(self, label: str) -> Located | None:
        """Return the model with its headers only: it can be compared with others but not read."""
        if self.config is None or not self.header:
            return None
        return Located(
            label,
            Path(self.ref),
            self.config,
            list(self.header),
            lambda canonical, aliases: RemoteWeights(
                label, self.ref, self.header, name_shared(self.header, canonical, aliases)
            ),
        )


class RemoteWeights:
    """Tensors of a model on the Hub by canonical name: their shapes and dtypes, not their values."""

    def __init__(self, label: str, ref: str, header: Header, canonical: Canonical) -> None:
        self.label = label
        self.files: Sequence[Path] = ()
        self.leftovers: Mapping[str, Path] = {name: Path(ref) for name in header if canonical(name) is None}
        named = {stored: name for stored in header if (name := canonical(stored)) is not None}
        self.info: Mapping[str, TensorInfo] = {
            name: TensorInfo(header[stored][0], dtype_of(header[stored][1], f"{label}: tensor '{stored}' in {ref}"))
            for stored, name in named.items()
        }
        self._ref = ref

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        self._refuse()

    def repeats(self, stored: str, name: str) -> bool:
        """Return True, because only the values, which are not here, could show otherwise."""
        return True

    def _refuse(self) -> NoReturn:
        raise InputError(f"{self.label}: '{self._ref}' was not fetched from the Hub yet")


def remote_model(model: HubModel) -> RemoteModel:
    """Ask the Hub for a model: sizes, headers and config; no weights are fetched.

    Raises:
        InputError: no such model, folder or revision, gated, or not in safetensors.
        Unreachable: the Hub does not answer.
    """
    ref = model.ref
    info = look_up(ref, "model", lambda api: api.model_info(model.repo, files_metadata=True, revision=model.revision))
    if info.gated:
        # Gated models answer with sizes to everybody; this asks whether this user may fetch them.
        look_up(ref, "model", lambda api: api.auth_check(model.repo))
    from huggingface_hub.utils import filter_repo_objects

    sizes = {one.rfilename: one.size or 0 for one in info.siblings or ()}
    if model.folder and not model.select_files(sizes):
        raise InputError(no_such_folder(model, sizes))
    wanted = list(filter_repo_objects(list(sizes), **model.patterns))
    if model.path(RECORD_FILE) in sizes:
        wanted += filter_repo_objects(list(sizes), allow_patterns=model.task_patterns)
    own = [name for name in model.select_files(sizes) if "/" not in name]
    pickles: list[str] = []
    if not any(name.endswith(".safetensors") for name in own):
        pickles = list(filter_repo_objects(list(sizes), **model.pickle_patterns))
        training = explain_training_state("FOLDER", {name.partition("/")[0] for name in model.select_files(sizes)})
        if training:
            raise InputError(f"'{ref}' on the Hub has no safetensors; fetch it to a folder FOLDER: {training}")
        if not pickles:
            raise InputError(f"'{ref}' on the Hub has no weights that featcal reads{model.other_folders(sizes)}")
    download = Download(
        ref,
        "model",
        len(wanted) + len(pickles),
        sum(sizes[name] for name in (*wanted, *pickles)),
        sum(sizes[name] for name in pickles),
    )
    config, adapter = (
        _fetch_json(model, name) if name in own else None for name in ("config.json", "adapter_config.json")
    )
    return RemoteModel(ref, download, config, _header(model, own), adapter)


def _header(model: HubModel, own: Sequence[str]) -> Header:
    """Return shape and dtype code of every tensor; only headers of files are requested from the Hub.

    Args:
        own: names of the files in the model's folder; without safetensors among them the result is empty.
    """
    if SINGLE_FILE in own:
        names = [SINGLE_FILE]
    elif INDEX_FILE in own:
        names = shards(_fetch_json(model, INDEX_FILE), f"'{model.ref}' on the Hub: {INDEX_FILE}")
    else:
        return {}

    def read(api: Any) -> list[Any]:
        def read_one(name: str) -> Any:
            return api.parse_safetensors_file_metadata(model.repo, model.path(name), revision=model.revision)

        # One request per shard, each mostly waiting.
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(read_one, names))

    files = look_up(model.ref, "model", read)
    return {name: (tuple(one.shape), str(one.dtype)) for file in files for name, one in file.tensors.items()}


def _fetch_json(model: HubModel, name: str) -> Mapping[str, Any]:
    """Read a small file of a model without a trace in the cache."""
    # Half a snapshot in the cache would look like a whole one.
    with tempfile.TemporaryDirectory() as folder, bar_of(model.ref) as bar:

        def fetch(api: Any) -> str:
            return str(
                api.hf_hub_download(
                    model.repo, model.path(name), revision=model.revision, local_dir=folder, tqdm_class=bar
                )
            )

        path = look_up(model.ref, "model", fetch)
        return read_json(Path(path), f"'{model.ref}' on the Hub: {name}")


def needed_on_disks(downloads: Iterable[Download]) -> list[tuple[str, int, int]]:
    """Return the bytes that downloads and their conversions need on each disk, and the free bytes there, by the name of
    the content."""
    from huggingface_hub import constants

    found = list(downloads)
    copied = sum(one.copied_bytes for one in found)
    folders = [
        ("the Hub's local cache", constants.HF_HUB_CACHE, sum(one.bytes for one in found)),
        # Asked only where something goes there: importing `datasets` takes a second.
        *([("the cache of `datasets`", _datasets_cache(), copied)] if copied else []),
        ("featcal's cache folder", cache_folder(), sum(one.pickled_bytes for one in found)),
    ]
    disks: dict[int, tuple[str, int, int]] = {}
    for name, folder, wanted in folders:
        place = Path(folder)
        # It may not be there yet: then its nearest parent says which disk it will be on.
        while not place.is_dir():
            place = place.parent
        first, before, free = disks.get(place.stat().st_dev, (name, 0, free_bytes(place)))
        if wanted:
            disks[place.stat().st_dev] = (first if before else name, before + wanted, free)
    return list(disks.values())


def _datasets_cache() -> str:
    if not is_installed("datasets"):
        from huggingface_hub import constants

        return str(constants.HF_HOME)
    import datasets

    return str(datasets.config.HF_DATASETS_CACHE)


def free_bytes(folder: Path) -> int:
    """Return the bytes that are free on the disk of a folder."""
    return shutil.disk_usage(folder).free
