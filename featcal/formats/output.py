"""An output folder that is complete or not there: everything goes to `OUT.partial/model`, which is renamed at the
end."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from featcal.formats.checkpoint import code_of
from featcal.formats.weights import TensorInfo, group_by_size, raw_bytes
from featcal.system.atomic_files import put
from featcal.system.errors import InputError
from featcal.system.fingerprints import sha256
from featcal.system.formatting import shorten
from featcal.system.locks import try_lock
from featcal.system.sandbox import require_inside

STREAMED = 64 * 2**20
"""Bytes of tensors that are in memory together where a file is streamed."""
_METADATA = {"format": "pt"}
"""What other libraries ask of a safetensors file."""
Read = Callable[[Sequence[str]], Mapping[str, Tensor]]


class Named(Protocol):
    """Tensors that are finished together, such as a block of a model."""

    @property
    def name(self) -> str:
        """What their file is called."""

    @property
    def names(self) -> Sequence[str]:
        """Their canonical names."""


class OutputFolder:
    """A model folder in the making: `with OutputFolder(out) as folder: … folder.commit()`.

    The files are written to `model`, a folder within `OUT.partial`, which no library takes for a model; `commit`
    renames it. Beside it lie the finished blocks of a calibration, each with its hash, from which a later run with
    `resume` goes on; what an interrupted run left without finishing a block is cleared away. A block whose file is not
    as it was written counts as unfinished.

    Args:
        out: must not exist.
        run: what identifies the run; a partial folder is continued by the same run only.

    Raises:
        InputError: `out` exists, cannot be written, is being written by another process, or has a partial folder with
            finished blocks that is not to be continued.
    """

    def __init__(self, out: str | Path, run: Mapping[str, Any] | None = None, resume: bool = False) -> None:
        self.out = Path(out).expanduser().absolute()
        require_inside(self.out, "output", to_write=True)
        self.partial = self.out.with_name(self.out.name + ".partial")
        self.model = self.partial / "model"
        self._blocks = self.partial / "blocks"
        self._identity = self.partial / "run.json"
        self._keep = False
        made = not os.path.lexists(self.partial)
        try:
            with ExitStack() as held:
                self._check_absent()
                self._hold(held)
                self._check_absent()  # whoever wrote there has finished meanwhile
                if self._has_finished_blocks():
                    self._check_continued(json.loads(json.dumps(run)), resume)
                self._clear(self.model, *([] if self._has_finished_blocks() else [self._blocks, self._identity]))
                self.model.mkdir()
                self._blocks.mkdir(exist_ok=True)
                put(self._identity, json.dumps(run))
                self._held = held.pop_all()
        except OSError as error:
            if made:
                shutil.rmtree(self.partial, ignore_errors=True)
            place = shorten(str(self.partial), 200)
            raise InputError(f"cannot write to {place}: {error.strerror}; choose another --out") from error

    def _check_absent(self) -> None:
        if os.path.lexists(self.out):  # a link too that leads nowhere: nothing can be renamed to it
            place = shorten(str(self.out), 200)
            raise InputError(f"{place} exists already; choose another --out or remove it (nothing is overwritten)")

    def _hold(self, held: ExitStack) -> None:
        """Keep other processes off the partial folder."""
        writer = self.partial / "writer.json"
        if not held.enter_context(try_lock(self.partial / "lock", patience=0)):
            try:
                other = json.loads(writer.read_text(encoding="utf-8"))
                who = f"process {other['process']} on {other['host']}"
            except (OSError, ValueError):  # it has only begun, or is about to end
                who = "another process"
            raise InputError(f"{who} is writing to {self.partial}; wait until it has ended, or choose another --out")
        put(writer, json.dumps({"process": os.getpid(), "host": platform.node()}))

    def _has_finished_blocks(self) -> bool:
        """Whether a block was finished here."""
        return any(self._blocks.glob("*.json"))

    def _check_continued(self, run: dict[str, Any] | None, resume: bool) -> None:
        if not resume:
            raise InputError(f"{self.partial} is left from an interrupted run; continue it with --resume or remove it")
        try:
            before = json.loads(self._identity.read_text(encoding="utf-8")) if self._identity.is_file() else None
        except ValueError as error:
            raise InputError(f"{self._identity} is damaged; remove {self.partial} to start anew") from error
        if before != run:
            raise InputError(
                f"{self.partial} comes from a run with other inputs, options or versions; remove it to start anew"
            )

    @staticmethod
    def _clear(*places: Path) -> None:
        for place in places:
            if place.is_dir():
                shutil.rmtree(place)
            else:
                place.unlink(missing_ok=True)

    def read_finished(self, block: Named) -> dict[str, Tensor] | None:
        """Tensors of a block that was finished; None if it was not, or is not as it was written.

        They are copies: products of tensors that are mapped from disk can differ in the last bit from products of the
        same numbers where the allocator puts them.
        """
        file, mark = self._file(block), self._mark(block)
        if mark is None or not file.is_file() or mark.get("sha256") != sha256(file):
            return None
        return {name: tensor.clone() for name, tensor in load_file(file).items()}

    def facts(self, block: Named) -> dict[str, Any]:
        """What `put` was told of a finished block beside its tensors."""
        return dict((self._mark(block) or {}).get("facts", {}))

    def finished_tensors(self, blocks: Iterable[Named]) -> Mapping[str, Tensor]:
        """All tensors of finished blocks by name, each read when it is looked up; gone after `commit`."""
        return _BlockFiles({name: self._file(block) for block in blocks for name in block.names})

    def put(self, block: Named, tensors: Mapping[str, Tensor], facts: Mapping[str, Any] | None = None) -> None:
        """Keep a finished block on disk.

        Args:
            facts: small things as JSON has them that belong to it; none of them gets into the model.

        Raises:
            InputError: the disk refuses.
        """
        file = self._file(block)
        try:
            self._clear(self._mark_file(block))
            put(file, lambda place: save_tensors(tensors, place))
            put(self._mark_file(block), json.dumps({"sha256": sha256(file), "facts": dict(facts or {})}))
        except OSError as error:
            raise InputError(f"cannot write {file}: {error.strerror}") from error

    def forget(self) -> None:
        """Let go of all finished blocks: what they were made of is not what it was."""
        self._clear(self._blocks)

    def adopt(self, block: Named, name: str) -> bool:
        """Make a finished block the weight file `name` without a second copy; False if it was not finished.

        The block stays where `resume` finds it: both names are the same file, or a copy where the disk has no links.
        """
        file, target = self._file(block), self.model / name
        if not file.is_file():
            return False
        try:
            target.unlink(missing_ok=True)
            try:
                os.link(file, target)
            except OSError:
                shutil.copyfile(file, target)
        except OSError as error:
            raise InputError(f"cannot write {target}: {error.strerror}") from error
        return True

    def _file(self, block: Named) -> Path:
        return self._blocks / f"{block.name}.safetensors"

    def _mark_file(self, block: Named) -> Path:
        """What says that a block is finished: its hash and its facts, written last."""
        return self._file(block).with_suffix(".json")

    def _mark(self, block: Named) -> dict[str, Any] | None:
        """What the mark of a block says; None where there is none, or not as it was written."""
        try:
            mark = json.loads(self._mark_file(block).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        return mark if isinstance(mark, dict) and isinstance(mark.get("facts"), dict) else None

    def commit(self) -> None:
        """Turn what was written into the output folder, whole.

        Raises:
            InputError: something else has come to be there; what was written stays where it is.
        """
        self._keep = True
        try:
            os.replace(self.model, self.out)
        except OSError as error:
            raise InputError(
                f"cannot rename {self.model} to {self.out}: {error.strerror}; the model is finished: move it elsewhere"
            ) from error
        self._held.close()
        shutil.rmtree(self.partial)

    def __enter__(self) -> OutputFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """After a failure remove the partial folder, unless it holds finished blocks to resume from, or a model."""
        self._held.close()
        if kind is not None and self.partial.exists() and not (self._keep or self._has_finished_blocks()):
            shutil.rmtree(self.partial)


class _BlockFiles(Mapping[str, Tensor]):
    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files

    def __getitem__(self, name: str) -> Tensor:
        file = self._files[name]
        try:
            with safe_open(file, framework="pt") as handle:
                tensor: Tensor = handle.get_tensor(name)
                return tensor
        except (OSError, SafetensorError) as error:
            raise InputError(f"cannot read the finished block {file}: {error}; somebody else has changed it") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def save_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """One safetensors file with the metadata that other libraries ask for; InputError if the disk refuses.

    It has the permissions of any new file, where safetensors gives it to its owner alone.
    """
    try:
        file.touch()
        mode = file.stat().st_mode
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, file, _METADATA)
        file.chmod(mode)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot write {file}: {error}") from error


def stream_tensors(info: Mapping[str, TensorInfo], read: Read, file: Path) -> None:
    """The same file as `save_tensors` writes, with `STREAMED` bytes of tensors in memory at a time, or one tensor.

    A safetensors file is the length of a header, the header in JSON, and the tensors' bytes one after the other.

    Args:
        info: shape and dtype of everything that is written.
        read: gives the tensors of some names.

    Raises:
        InputError: the disk refuses.
    """
    names = sorted(info, key=lambda name: (-info[name].dtype.itemsize, name))  # every tensor is aligned to its dtype
    sizes = {name: torch.Size(info[name].shape).numel() * info[name].dtype.itemsize for name in names}
    header: dict[str, Any] = {"__metadata__": _METADATA}
    start = 0
    for name, size in sizes.items():
        shape, code = list(info[name].shape), code_of(info[name].dtype)
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    try:
        with file.open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for group in group_by_size(sizes, STREAMED):
                tensors = read(group)
                for name in group:
                    out.write(raw_bytes(tensors[name]))
    except OSError as error:
        raise InputError(f"cannot write {file}: {error.strerror}") from error


def save_text(text: str, file: Path) -> None:
    """A UTF-8 text file; InputError if the disk refuses."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {file}: {error.strerror}") from error
