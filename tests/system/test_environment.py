"""Warnings of torch that the owner of a process passes over, and how long its threads wait awake."""

import os
import warnings

import pytest

from featcal.system.environment import ignore_own_warnings_of_torch, let_threads_sleep


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
