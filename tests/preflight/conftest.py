"""A Hub of local folders for every test of this room."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import huggingface_hub
import pytest
from fake_hub import FakeHub
from huggingface_hub import constants


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., FakeHub]:
    """Put a Hub of local folders in place of the real one, with an empty cache."""

    def build(models: Mapping[str, Path], gated: tuple[str, ...] = ()) -> FakeHub:
        fake = FakeHub(models, gated)
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: fake)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "no-cache"))
        return fake

    return build
