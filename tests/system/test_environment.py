"""Warnings of torch that the owner of a process passes over, how long its threads wait awake, whose processor it is."""

import os
import warnings
from pathlib import Path

import pytest

from featcal.system import environment
from featcal.system.environment import ignore_own_warnings_of_torch, let_threads_sleep
from featcal.system.resources import cache_folder


def test_the_cache_folder_may_be_named_from_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somebody")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    for given, found in (("~/own", "/somebody/own"), ("", "/cache/featcal"), ("/own", "/own")):
        monkeypatch.setenv("FEATCAL_CACHE", given)
        assert cache_folder() == Path(found)


def test_torch_may_warn_of_its_own_code_alone() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ignore_own_warnings_of_torch()
        warnings.warn("`torch.jit.script` is deprecated. Please switch to `torch.compile`", FutureWarning, stacklevel=1)
        with pytest.raises(FutureWarning):
            warnings.warn("`torch.jit.trace` is deprecated", FutureWarning, stacklevel=1)


@pytest.mark.parametrize(
    ("given", "spins"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)]
)
def test_threads_sleep_soon_unless_the_environment_says_how_long_they_wait(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], spins: str | None
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    let_threads_sleep()
    assert os.environ.get("GOMP_SPINCOUNT") == spins


@pytest.mark.parametrize(
    ("named", "identifier", "intel"),
    [
        ("model name\t: Intel(R) Xeon(R) Processor", "", True),
        ("model name\t: AMD EPYC", "", False),
        (None, "Intel64 Family 6 Model 158 Stepping 10, GenuineIntel", True),
        (None, "AMD64 Family 25 Model 33 Stepping 0, AuthenticAMD", False),
    ],
)
def test_the_maker_of_the_processor_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named: str | None, identifier: str, intel: bool
) -> None:
    if named is not None:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{named}\n")
    monkeypatch.setattr(environment, "_PROCESSORS", tmp_path / "cpuinfo")
    monkeypatch.setenv("PROCESSOR_IDENTIFIER", identifier)
    assert environment.is_intel.__wrapped__() is intel
