"""What the Hub says of a model or data set before anything of it is fetched but its config."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from featcal.errors import InputError
from featcal.formats.checkpoint import (
    HUB_FILES,
    INDEX_FILE,
    SINGLE_FILE,
    Header,
    dtype_of,
    hub_problem,
    pickled,
    unpickling,
)
from featcal.formats.located import Located
from featcal.formats.weights import Canonical, TensorInfo
from featcal.jsons import read_json


@dataclass(frozen=True)
class Download:
    """What a run would fetch first."""

    ref: str
    kind: str
    """"model" or "data set"."""
    files: int
    bytes: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Unreachable(Exception):
    """The Hub does not answer: nothing can be said of an id."""


@dataclass(frozen=True)
class RemoteModel:
    """A model on the Hub that is not in the local cache."""

    ref: str
    download: Download
    config: Mapping[str, Any] | None
    """Content of its `config.json`; None for an adapter or another layout."""
    header: Header
    """Shape and dtype code of its tensors, read from the Hub; empty where they are in another layout."""
    adapter: Mapping[str, Any] | None = None
    """Content of its `adapter_config.json`, for a LoRA adapter."""

    def located(self, label: str) -> Located | None:
        """The model as far as its headers go: it can be compared with others but not read."""
        if self.config is None or not self.header:
            return None
        return Located(
            label,
            Path(self.ref),
            self.config,
            list(self.header),
            lambda canonical, _: RemoteWeights(label, self.ref, self.header, canonical),
        )


class RemoteWeights:
    """Tensors of a model on the Hub by canonical name: their shapes and dtypes, not their values."""

    def __init__(self, label: str, ref: str, header: Header, canonical: Canonical) -> None:
        self.label = label
        self.files: Sequence[Path] = ()
        self.left_out: Mapping[str, Path] = {name: Path(ref) for name in header if canonical(name) is None}
        named = {stored: name for stored in header if (name := canonical(stored)) is not None}
        self.info: Mapping[str, TensorInfo] = {
            name: TensorInfo(header[stored][0], dtype_of(header[stored][1], f"{label}: tensor '{stored}' in {ref}"))
            for stored, name in named.items()
        }
        self._ref = ref

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        self._refuse()

    def repeats(self, stored: str, name: str) -> bool:
        """Taken for granted: only its values could tell."""
        return True

    def _refuse(self) -> NoReturn:
        raise InputError(f"{self.label}: '{self._ref}' was not fetched from the Hub yet")


def remote_model(ref: str) -> RemoteModel:
    """Ask the Hub for a model `owner/name[@revision]`: sizes, headers and config; no weights are fetched.

    Raises:
        InputError: no such model or revision, gated, or not in safetensors.
        Unreachable: the Hub does not answer.
    """
    repo, _, revision = ref.partition("@")
    with_revision = {"revision": revision or None}
    info = _ask(ref, "model", lambda api: api.model_info(repo, files_metadata=True, **with_revision))
    if info.gated:
        _ask(ref, "model", lambda api: api.auth_check(repo))
    from huggingface_hub.utils import filter_repo_objects

    sizes = {one.rfilename: one.size or 0 for one in info.siblings or ()}
    wanted = list(filter_repo_objects(list(sizes), allow_patterns=HUB_FILES))
    download = Download(ref, "model", len(wanted), sum(sizes[name] for name in wanted))
    header: Header = {}
    if SINGLE_FILE in sizes or INDEX_FILE in sizes:
        found = _ask(ref, "model", lambda api: api.get_safetensors_metadata(repo, **with_revision))
        for file in found.files_metadata.values():
            header |= {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in file.tensors.items()}
    elif not any(name.endswith(".safetensors") for name in sizes):
        pickles = pickled(name for name in sizes if "/" not in name)
        what = f"only pickled weights ({', '.join(pickles)})" if pickles else "no safetensors"
        remedy = f"; fetch it to a folder FOLDER and {unpickling('FOLDER', pickles)}" if pickles else ""
        raise InputError(f"'{ref}' on the Hub has {what}{remedy}")
    config, adapter = (
        _fetched(ref, name) if name in sizes else None for name in ("config.json", "adapter_config.json")
    )
    return RemoteModel(ref, download, config, header, adapter)


def remote_data(ref: str, config: str | None) -> Download:
    """Ask the Hub for the size of a data set; of a configuration with a folder of its own only that.

    Raises:
        InputError: no such data set or revision, or gated.
        Unreachable: the Hub does not answer.
    """
    repo, _, revision = ref.partition("@")
    info = _ask(ref, "data set", lambda api: api.dataset_info(repo, revision=revision or None, files_metadata=True))
    if info.gated:
        _ask(ref, "data set", lambda api: api.auth_check(repo, repo_type="dataset"))
    sizes = {one.rfilename: one.size or 0 for one in info.siblings or ()}
    own = {name: size for name, size in sizes.items() if config and name.startswith(f"{config}/")}
    return Download(ref, "data set", len(own or sizes), sum((own or sizes).values()))


def _ask(ref: str, kind: str, question: Callable[[Any], Any]) -> Any:
    import huggingface_hub
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        NotASafetensorsRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
        SafetensorsParsingError,
    )

    try:
        return question(huggingface_hub.HfApi())
    except (GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise InputError(hub_problem(error, ref, kind)) from error
    except (EntryNotFoundError, NotASafetensorsRepoError, SafetensorsParsingError, HFValidationError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"'{ref}' on the Hub cannot be read: {reason}") from error
    except (HfHubHTTPError, OSError) as error:
        raise Unreachable(type(error).__name__) from error
    except Exception as error:  # connection errors of the client's own transport
        if type(error).__module__.startswith(("httpx", "requests", "urllib3")):
            raise Unreachable(type(error).__name__) from error
        raise


def _fetched(ref: str, name: str) -> Mapping[str, Any]:
    """A small file of a model, read without a trace in the cache: half a snapshot there would look like a whole."""
    repo, _, revision = ref.partition("@")
    with tempfile.TemporaryDirectory() as folder:
        path = _ask(
            ref, "model", lambda api: api.hf_hub_download(repo, name, revision=revision or None, local_dir=folder)
        )
        return read_json(Path(path), f"'{ref}' on the Hub: {name}")
