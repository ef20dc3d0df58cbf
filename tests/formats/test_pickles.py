"""Pickled weights: read as safetensors are, to the bit, and nothing of them is run."""

from __future__ import annotations

import errno
import json
import os
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from featcal import CalibrationConfig, calibrate, load_suite
from featcal.formats import output
from featcal.formats.checkpoint import Checkpoint
from featcal.formats.pickles import convert_once
from featcal.system.errors import InputError

STATE = {
    "a.weight": torch.arange(12.0).reshape(3, 4).T,  # not contiguous
    "b.half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "position_ids": torch.arange(5)[None],
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path / "cache"))


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint(folder, "m", lambda name: name)
    return checkpoint.read(checkpoint.info)


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert all(found[name].dtype == one.dtype and torch.equal(found[name], one) for name, one in wanted.items())


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: {"model": s, "epoch": 3}, lambda s: {"state_dict": s}])
def test_a_pickle_is_read_to_the_bit(tmp_path: Path, legacy: bool, wrap: Callable[[Any], Any]) -> None:
    torch.save(wrap(STATE), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    assert_equal(read_all(tmp_path), STATE)


def test_shards_prefixes_and_entries_that_are_no_tensors(tmp_path: Path) -> None:
    torch.save({f"module.{name}": STATE[name] for name in ("a.weight", "b.half")}, tmp_path / "x-1.bin")
    torch.save({"position_ids": STATE["position_ids"], "step": 7, "names": ["a"]}, tmp_path / "x-2.bin")
    places = {"a.weight": "x-1.bin", "b.half": "x-1.bin", "position_ids": "x-2.bin"}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    assert_equal(read_all(tmp_path), STATE)


def test_safetensors_win(tmp_path: Path, own_suite_file: Path) -> None:
    folder = own_suite_file.parent / "base"
    (folder / "pytorch_model.bin").write_bytes(b"never read")
    assert_equal(read_all(folder), load_file(folder / "model.safetensors"))
    assert not (tmp_path / "cache" / "converted").exists()


def test_a_pickle_is_converted_once_and_again_when_it_changes(tmp_path: Path) -> None:
    file, copy = tmp_path / "pytorch_model.bin", tmp_path / "copy.bin"
    torch.save(STATE, file)
    first = convert_once(file, "m")
    made = first.stat().st_mtime_ns
    copy.write_bytes(file.read_bytes())
    assert convert_once(file, "m") == convert_once(copy, "m") == first
    assert first.stat().st_mtime_ns == made
    torch.save({**STATE, "b.half": STATE["b.half"] + 1}, file)
    assert_equal(load_file(convert_once(file, "m")), {**STATE, "b.half": STATE["b.half"] + 1})


def test_a_suite_of_pickles_is_calibrated_alike(own_suite_file: Path) -> None:
    def weights() -> dict[str, torch.Tensor]:
        made = calibrate(load_suite(own_suite_file), CalibrationConfig(samples=4), device="cpu").weights
        return made.read(made.info)

    wanted = weights()
    for file in [*own_suite_file.parent.rglob("model.safetensors")]:
        torch.save(load_file(file), file.with_name("pytorch_model.bin"))
        file.unlink()
    assert_equal(weights(), wanted)


class _Runs:
    """Would make a folder when it is unpickled."""

    def __init__(self, where: Path) -> None:
        self.where = where

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.where),)


def _torch_save(content: Any, **options: Any) -> Callable[[Path], object]:
    return lambda file: torch.save(content(file) if callable(content) else content, file, **options)


def _repack(change: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED) -> Callable[[Path], object]:
    def damage(file: Path) -> None:
        torch.save(STATE, file)
        with zipfile.ZipFile(file) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(file, "w", compression) as archive:
            for name, data in members.items():
                archive.writestr(name, change(name, data))

    return damage


def _cut(file: Path) -> None:
    torch.save(STATE, file)
    file.write_bytes(file.read_bytes()[:-200])


def _write_tar(file: Path) -> None:
    with tarfile.open(file, "w") as archive:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            part = file.with_name(name)
            part.write_bytes(pickle.dumps({"protocol_version": 1000, "little_endian": True}))
            archive.add(part, name)


HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a command": (_torch_save(lambda file: {"a": torch.ones(2), "b": _Runs(file.parent / "RAN")}), r"holds \w+\.mkdir"),
    "a command of old torch": (
        _torch_save(lambda file: {"b": _Runs(file.parent / "RAN")}, _use_new_zipfile_serialization=False),
        r"holds \w+\.mkdir",
    ),
    "a bare pickle": (lambda file: file.write_bytes(pickle.dumps(_Runs(file.parent / "RAN"))), "damaged"),
    "a numpy value": (_torch_save({"a": torch.ones(2), "n": np.float64(3)}), r"holds numpy\S*\.scalar"),
    "a module": (_torch_save(lambda file: torch.nn.Linear(2, 2)), r"holds torch\.nn\.modules\.linear\.Linear"),
    "a list": (_torch_save([torch.ones(2)]), "a list"),
    "no tensors": (_torch_save({"optimizer": {}, "epoch": 3}), "'epoch' is int"),
    "an empty state": (_torch_save({}), "it is empty"),
    "a storage that is repeated": (_torch_save({"a": torch.ones(1).expand(10**6, 10**6)}), "larger than the file"),
    "a member that is short": (_repack(lambda name, data: data[:4] if "/data/" in name else data), "damaged"),
    "compressed members": (_repack(lambda name, data: data, zipfile.ZIP_DEFLATED), "a compressed archive"),
    "a truncated archive": (_cut, "damaged"),
    "an empty file": (lambda file: file.write_bytes(b""), "damaged"),
    "complex numbers": (_torch_save({"a": torch.ones(2, dtype=torch.complex64)}), "dtype torch.complex64"),
    "sparse values": (_torch_save({"a": torch.ones(2, 2).to_sparse()}), "no dense values"),
    "a tar of old torch": (_write_tar, "damaged"),
}


@pytest.mark.filterwarnings("ignore")  # what torch says of such files is not ours
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_are_refused_and_run_nothing(tmp_path: Path, name: str) -> None:
    write, said = HOSTILE[name]
    file = tmp_path / "pytorch_model.bin"
    write(file)
    with pytest.raises(InputError, match=said) as refused:
        convert_once(file, "base")
    assert str(refused.value).startswith(f"base: {file}")
    assert not (tmp_path / "RAN").exists()
    assert not [*(tmp_path / "cache").rglob("*.safetensors")]


def test_several_pickles_without_an_index(tmp_path: Path) -> None:
    for name in ("one.pt", "two.pt"):
        torch.save(STATE, tmp_path / name)
    with pytest.raises(InputError, match=r"several pickled files and no index \('one\.pt', 'two\.pt'\)"):
        Checkpoint(tmp_path, "m", lambda name: name)
    (tmp_path / "two.pt").unlink()
    assert_equal(read_all(tmp_path), STATE)


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(STATE, tmp_path / "pytorch_model.bin")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path / "file"))
    with pytest.raises(InputError, match="set FEATCAL_CACHE to a folder that can be written"):
        convert_once(tmp_path / "pytorch_model.bin", "m")


def test_a_disk_that_fills_during_the_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(STATE, tmp_path / "pytorch_model.bin")
    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path / "cache"))

    def full(tensor: torch.Tensor) -> bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(output, "raw_bytes", full)
    said = r"m: .*pytorch_model\.bin cannot be converted to .*: No space left on device; set FEATCAL_CACHE to a folder"
    with pytest.raises(InputError, match=said):
        convert_once(tmp_path / "pytorch_model.bin", "m")
    assert not [*(tmp_path / "cache").rglob("*.safetensors*")]
