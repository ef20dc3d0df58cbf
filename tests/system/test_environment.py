"""What the owner of a process passes over of what torch says."""

import warnings

import pytest

from featcal.system.environment import ignore_own_warnings_of_torch


def test_torch_may_warn_of_its_own_code_alone() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ignore_own_warnings_of_torch()
        warnings.warn("`torch.jit.script` is deprecated. Please switch to `torch.compile`", FutureWarning, stacklevel=1)
        with pytest.raises(FutureWarning):
            warnings.warn("`torch.jit.trace` is deprecated", FutureWarning, stacklevel=1)
