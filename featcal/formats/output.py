"""Write an output folder that is complete or absent: files go to `OUT.partial/model`, which is renamed at the end."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol
from uuid import uuid4

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from featcal.formats.weights import TensorInfo, code_of, group_by_size, raw_bytes
from featcal.system.atomic_files import put
from featcal.system.errors import InputError
from featcal.system.fingerprints import sha256
from featcal.system.formatting import shorten, some
from featcal.system.locks import try_lock
from featcal.system.sandbox import require_inside

PARTIAL = ".partial"
"""Ending of the folder beside an output that is still being written."""
_LOCK, _WRITER = "lock", "writer.json"
"""Files of a partial folder: the lock of the writing process, and its identity."""
STREAMED = 64 * 2**20
"""Bytes of tensors that are in memory together while a file is streamed."""
_METADATA = {"format": "pt"}
"""Metadata that other libraries require of a safetensors file."""
Read = Callable[[Sequence[str]], Mapping[str, Tensor]]


class Named(Protocol):
    """Tensors that are finished together, such as those of a block of a model."""

    @property
    def name(self) -> str:
        """Return the name of the file of these tensors."""

    @property
    def names(self) -> Sequence[str]:
        """Return the canonical names of these tensors."""


def require_absent(out: str | Path) -> None:
    """Raise InputError if the name of a new folder is taken, or none."""
    out = Path(out).expanduser().absolute()
    place = shorten(str(out), 200)
    if out.name in ("", ".."):
        raise InputError(f"{place} is no name for a new folder; choose another")
    if os.path.lexists(out):  # lexists: a broken link is in the way of the rename, too
        raise InputError(f"{place} exists already; choose another folder or remove it (nothing is overwritten)")


class OutputFolder:
    """A model folder under construction: `with OutputFolder(out) as folder: … folder.commit()`.

    Files are written to `model`, a folder within `OUT.partial`, which no library recognises as a model; `commit`
    renames it. The finished blocks of a calibration are beside it, each with its hash, and a later run with `resume`
    continues from them. A block whose file has changed counts as unfinished; an interrupted run without finished blocks
    leaves nothing.

    Args:
        out: must not exist.
        run: facts that identify the run; only the same run continues a partial folder.

    Raises:
        InputError: `out` exists, cannot be written, is being written by another process, or has a partial folder with
            finished blocks while `resume` is not set.
    """

    def __init__(self, out: str | Path, run: Mapping[str, Any] | None = None, resume: bool = False) -> None:
        self.out = Path(out).expanduser().absolute()
        require_inside(self.out, "output", to_write=True)
        self.partial = partial_folder(self.out)
        self.model = self.partial / "model"
        self._blocks = self.partial / "blocks"
        self._identity = self.partial / "run.json"
        self._keep = False
        made = not os.path.lexists(self.partial)
        try:
            with ExitStack() as held:
                require_absent(self.out)
                self._hold(held)
                try:
                    require_absent(self.out)  # another process may have finished before the lock was free
                    self._begin(run, resume)
                except (InputError, OSError):
                    if made:
                        _remove(self.partial, held)
                    raise
                self._held = held.pop_all()
        except OSError as error:
            if made:
                with suppress(OSError):  # which is refused where another process has begun in it
                    self.partial.rmdir()
            place = shorten(str(self.out), 200)
            raise InputError(f"cannot write to {place}: {error.strerror}; choose another folder") from error

    def _hold(self, held: ExitStack) -> None:
        """Lock the partial folder against other processes."""
        if not held.enter_context(try_lock(self.partial / _LOCK, patience=0)):
            writer = _read_writer(self.partial)
            # Without one the other process has just begun, or is about to end.
            who = f"process {writer['process']} on {writer['host']}" if writer else "another process"
            raise InputError(f"{who} is writing to {self.partial}; wait until it has ended, or choose another folder")

    def _begin(self, run: Mapping[str, Any] | None, resume: bool) -> None:
        """Take over the folder for this process, and remove everything except finished
        blocks that the run continues from.
        """
        if self._has_finished_blocks():
            # Through JSON and back, so that tuples equal the lists that `run.json` holds.
            self._check_continued(json.loads(json.dumps(run)), resume)
        put(self.partial / _WRITER, json.dumps(_this_process()))
        _clear(self.model, *([] if self._has_finished_blocks() else [self._blocks, self._identity]))
        self.model.mkdir()
        self._blocks.mkdir(exist_ok=True)
        put(self._identity, json.dumps(run))

    def _has_finished_blocks(self) -> bool:
        """Say whether a block was finished in this folder."""
        return any(self._blocks.glob("*.json"))

    def _check_continued(self, run: dict[str, Any] | None, resume: bool) -> None:
        if not resume:
            # Only a calibration continues; what has no identity is written anew.
            further = "remove it or choose another folder" if run is None else "continue it with --resume or remove it"
            raise InputError(f"{self.partial} is left from an interrupted run; {further}")
        try:
            before = json.loads(self._identity.read_text(encoding="utf-8")) if self._identity.is_file() else None
        except ValueError as error:
            raise InputError(f"{self._identity} is damaged; remove {self.partial} to start again") from error
        if other := _differences(before or {}, run or {}):
            raise InputError(f"{self.partial} comes from a run with other {some(other)}; remove it to start again")

    def read_finished(self, block: Named) -> dict[str, Tensor] | None:
        """Return the tensors of a finished block; None if it is unfinished, or its file has changed."""
        file, mark = self._file(block), self._mark(block)
        if mark is None or not file.is_file() or mark.get("sha256") != sha256(file):
            return None
        # Copies: products of tensors mapped from disk can differ in the last bit from products of the same numbers
        # where the allocator puts them.
        return {name: tensor.clone() for name, tensor in load_file(file).items()}

    def facts(self, block: Named) -> dict[str, Any]:
        """Return the facts that were passed to `put` with a finished block."""
        return dict((self._mark(block) or {}).get("facts", {}))

    def finished_tensors(self, blocks: Iterable[Named]) -> Mapping[str, Tensor]:
        """Return all tensors of finished blocks by name, each read when it is looked up; unavailable after `commit`."""
        files = {name: self._file(block) for block in blocks for name in block.names}
        return _BlockFiles(files | {name: file for file in set(files.values()) for name in _names_in(file)})

    def put(self, block: Named, tensors: Mapping[str, Tensor], facts: Mapping[str, Any] | None = None) -> None:
        """Store a finished block on disk.

        Args:
            facts: small JSON values about it, which do not become part of the model.

        Raises:
            InputError: the disk is full or not writable.
        """
        file = self._file(block)
        try:
            # The mark goes first and comes back last: a crash in between leaves an unfinished block, never a wrong one.
            _clear(self._mark_file(block))
            put(file, lambda place: save_tensors(tensors, place))
            put(self._mark_file(block), json.dumps({"sha256": sha256(file), "facts": dict(facts or {})}))
        except OSError as error:
            raise InputError(f"cannot write {file}: {error.strerror}") from error

    def forget(self) -> None:
        """Delete all finished blocks, because their inputs have changed."""
        _clear(self._blocks)

    def adopt(self, block: Named, name: str) -> bool:
        """Make a finished block the weight file `name` without a second copy; return False if it is not finished.

        The block stays in its place for `resume`: both names are the same file, or a copy if the disk has no hard
        links.
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

    def reject(self) -> None:
        """Delete the written files, because they do not reproduce the model; finished blocks stay."""
        _clear(self.model)

    def _file(self, block: Named) -> Path:
        return self._blocks / f"{block.name}.safetensors"

    def _mark_file(self, block: Named) -> Path:
        """Return the file that marks a block as finished: its hash and its facts, written last."""
        return self._file(block).with_suffix(".json")

    def _mark(self, block: Named) -> dict[str, Any] | None:
        """Return the content of a block's mark; None if it is missing or damaged."""
        try:
            mark = json.loads(self._mark_file(block).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        return mark if isinstance(mark, dict) and isinstance(mark.get("facts"), dict) else None

    def commit(self) -> None:
        """Rename the written files to the output folder.

        Raises:
            InputError: the output exists by now; the written files stay in the partial folder.
        """
        # From here on the model is finished: a failed rename must not delete it.
        self._keep = True
        try:
            os.replace(self.model, self.out)
        except OSError as error:
            raise InputError(
                f"cannot rename {self.model} to {self.out}: {error.strerror}; the model is finished: move it elsewhere"
            ) from error
        _remove(self.partial, self._held)

    def __enter__(self) -> OutputFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the partial folder after a failure, unless it holds finished blocks or a finished model."""
        if kind is not None and self.partial.exists() and not (self._keep or self._has_finished_blocks()):
            _remove(self.partial, self._held)
        self._held.close()


def partial_folder(out: Path) -> Path:
    """Return the folder in which an output is written until it is complete.

    >>> partial_folder(Path("models/mine")).as_posix()
    'models/mine.partial'
    """
    return out.parent / f"{out.name}{PARTIAL}"


def remove_partial(out: Path, *, of_others: bool) -> None:
    """Remove the unfinished part of an output, including finished blocks, unless a process is writing it.

    Args:
        of_others: also remove what another process left behind; otherwise that stays.
    """
    partial = partial_folder(out)
    if not (partial / _LOCK).exists():
        return
    with ExitStack() as held:
        mine = held.enter_context(try_lock(partial / _LOCK, patience=0))
        if mine and (of_others or _read_writer(partial) == _this_process()):
            _remove(partial, held)


def _remove(partial: Path, held: ExitStack) -> None:
    """Remove a partial folder, as far as possible, and release its lock.

    Args:
        held: function that closes the lock.
    """
    with suppress(OSError):
        for place in partial.iterdir():
            if place.name != _LOCK:
                _clear(place)
        if os.name == "nt":  # which renames no folder with an open file in it, so neither one that another has begun in
            held.close()
        # Under another name, no longer than the old one, so that who begins here from now on has a folder of their own.
        gone = partial.with_name(f".{uuid4().hex[:8]}")
        os.rename(partial, gone)
        held.close()
        shutil.rmtree(gone)


def _clear(*places: Path) -> None:
    for place in places:
        if place.is_dir():
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)


def _this_process() -> dict[str, Any]:
    return {"process": os.getpid(), "host": platform.node()}


def _read_writer(partial: Path) -> dict[str, Any]:
    """Return the process that holds, or was the last to hold, a partial folder; {} if none is recorded."""
    try:
        found = json.loads((partial / _WRITER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and found.keys() == _this_process().keys() else {}


def _names_in(file: Path) -> list[str]:
    """Return the names of all tensors in the file of a block, which may contain additional ones; none if the file
    cannot be read, which a later look-up reports."""
    try:
        with safe_open(file, framework="pt") as handle:
            return list(handle.keys())
    except (OSError, SafetensorError):
        return []


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
            raise InputError(
                f"cannot read the finished block {file}: {error}; it has been changed meanwhile"
            ) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def save_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write a safetensors file with the metadata that other libraries require; raise
    InputError if the disk is full or not writable.
    """
    try:
        file.touch()
        # safetensors gives its files to their owner alone; they shall have the permissions of any new file.
        mode = file.stat().st_mode
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, file, _METADATA)
        file.chmod(mode)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot write {file}: {error}") from error


def stream_tensors(info: Mapping[str, TensorInfo], read: Read, file: Path) -> None:
    """Write a safetensors file like `save_tensors`, with at most `STREAMED` bytes of tensors, or one tensor, in memory.

    Args:
        info: shape and dtype of every tensor to write.
        read: returns the tensors of some names.

    Raises:
        InputError: the disk is full or not writable.
    """
    # The widest dtypes first: every tensor is then aligned to its dtype, as other libraries expect of mapped files.
    names = sorted(info, key=lambda name: (-info[name].dtype.itemsize, name))
    sizes = {name: info[name].nbytes for name in names}
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
            # The format: length of the header, header in JSON (padded to 8 bytes), bytes of the tensors one after the
            # other.
            out.write(len(text).to_bytes(8, "little") + text)
            for group in group_by_size(sizes, STREAMED):
                tensors = read(group)
                for name in group:
                    out.write(raw_bytes(tensors[name]))
    except OSError as error:
        raise InputError(f"cannot write {file}: {error.strerror}") from error


def _differences(before: Mapping[str, Any], run: Mapping[str, Any]) -> list[str]:
    """Return the facts that differ between two runs, with their names inside groups.

    >>> _differences({"config": {"lam": 1, "rho": 2}, "of": 3}, {"config": {"lam": 5, "rho": 2}, "of": 3})
    ['config lam']
    """
    found = []
    for name in sorted({*before, *run}):
        one, other = before.get(name), run.get(name)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            found += [f"{name} {key}" for key in sorted({*one, *other}) if one.get(key) != other.get(key)]
        elif one != other:
            found.append(name)
    return found


def save_text(text: str, file: Path) -> None:
    """Write a UTF-8 text file; raise InputError if the disk is full or not writable."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {file}: {error.strerror}") from error
