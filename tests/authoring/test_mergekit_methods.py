"""The definitions of methods in `mergekit_methods` are those of the package itself, where it is installed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mergekit_merges import run_package, write_by_formula, write_models
from mergekit_methods import METHODS
from safetensors.torch import load_file

pytest.importorskip("mergekit", reason="mergekit is not installed")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("method", METHODS)
def test_a_definition_gives_the_tensors_that_mergekit_writes(root: Path, method: str) -> None:
    own = load_file(write_by_formula(root, method) / "model.safetensors")
    theirs = run_package(root, method)
    assert own.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(own[name], tensor, rtol=1e-5, atol=1e-6)
