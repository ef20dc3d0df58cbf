"""The model that others were all fine-tuned from, by what cards and configurations name."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from fake_hub import put_in_cache

from featcal.authoring.ancestors import find_common_ancestors, is_named_by_all, is_reachable


def card(folder: Path, base_model: object, **data: object) -> str:
    """A model's folder whose card names what it was made from; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump({'base_model': base_model, **data})}---\n# A model\n")
    return str(folder)


def common(*models: str) -> list[str]:
    return find_common_ancestors(models, asks_hub=False)


def test_the_nearest_of_several_comes_first(tmp_path: Path) -> None:
    old = card(tmp_path / "old", None)
    base = card(tmp_path / "base", old)
    middle = card(tmp_path / "middle", base)
    a, b, c = card(tmp_path / "a", [middle], base_model_relation="finetune"), card(tmp_path / "b", "middle"), base
    assert common(a, b) == [middle, base, old]
    assert common(a, b, card(tmp_path / "d", c)) == [base, old]
    # An expert that another one comes from is no base of its own: what both come from is.
    assert common(middle, a) == [base, old]
    assert common(old, a) == []
    assert is_named_by_all(base, [a, b], asks_hub=False)
    assert not is_named_by_all(a, [b], asks_hub=False)


def test_adapters_and_configurations_name_it_too(tmp_path: Path) -> None:
    base = card(tmp_path / "base", None)
    adapter, whole = tmp_path / "adapter", tmp_path / "whole"
    for folder in (adapter, whole):
        folder.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "../base"}))
    (whole / "config.json").write_text(json.dumps({"_name_or_path": base}))
    assert common(str(adapter), str(whole), f"{base}+{adapter}") == [base]


def test_a_path_starts_beside_the_card_and_leads_to_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "models"
    a, b = card(home / "a", "../base"), card(home / "b", "base")
    (tmp_path / "elsewhere").mkdir()
    (home / "base").mkdir()
    card(tmp_path / "base", None)
    monkeypatch.chdir(tmp_path / "elsewhere")
    # The nearest folder of that name holds no model, the one above does.
    assert common(a, b) == [str(tmp_path / "base")]
    base = card(home / "base", None)
    assert common(a, b) == [base]


def test_what_others_wrote_does_no_harm(tmp_path: Path) -> None:
    a = card(tmp_path / "a", str(tmp_path / "b"))
    b = card(tmp_path / "b", [a, 3, "no such model", "x" * 9000, {"a": 1}])
    assert common(a, b) == []  # a circle has no beginning
    (tmp_path / "a" / "config.json").write_text("[")
    (tmp_path / "a" / "README.md").write_text("---\n{ no yaml\n---\n")
    assert common(a, b) == []


def test_the_hub_is_asked_where_its_cache_has_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    card(tmp_path / "here", "Org/Base")
    put_in_cache(tmp_path / "cache", "me/here", tmp_path / "here")
    asked: list[str] = []

    class Hub:
        def model_info(self, repo: str, *, revision: str | None = None) -> Any:
            asked.append(repo)
            stated = {"me/there": "org/base"}.get(repo)
            card_data = None if stated is None else SimpleNamespace(to_dict=lambda: {"base_model": stated})
            return SimpleNamespace(card_data=card_data, gated=False)

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    assert find_common_ancestors(["me/here", "me/there@v1"], asks_hub=False) == []
    assert not is_reachable("Org/Base", asks_hub=False)
    assert not asked
    assert find_common_ancestors(["me/here", "me/there@v1"], asks_hub=True) == ["Org/Base"]
    assert is_reachable("Org/Base", asks_hub=True)
    assert asked == ["Org/Base", "me/there", "org/base", "Org/Base"]
