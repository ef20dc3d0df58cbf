"""Versions and code of packages that bring something to featcal tell one run from another."""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

import featcal
from featcal.studies import history
from featcal.studies.history import current_maker
from featcal.system import versions
from featcal.system.versions import all_versions, extension_versions


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages with one that brings an architecture."""
    about = tmp_path / "bringing-1.2.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: bringing\nVersion: 1.2\n")
    (about / "entry_points.txt").write_text("[featcal.architectures]\nnew = bringing_rows.facts:FACTS\n")
    (tmp_path / "bringing_rows").mkdir()
    (tmp_path / "bringing_rows" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (tmp_path / "bringing_rows" / "facts.py").write_text("FACTS = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    extension_versions.cache_clear()
    yield tmp_path / "bringing_rows"
    extension_versions.cache_clear()


def test_code_of_a_package_that_brings_something_tells_runs_apart(site: Path) -> None:
    code = b"__init__.pyraise RuntimeError('imported')\nfacts.pyFACTS = 1\n"
    assert current_maker("cpu")["bringing"] == f"1.2, {hashlib.sha256(code).hexdigest()[:12]}"
    assert all_versions()["bringing"] == current_maker("cpu")["bringing"]
    before = current_maker("cpu")
    (site / "facts.py").write_text("FACTS = 2\n")
    extension_versions.cache_clear()  # as in the next process
    assert {name for name, value in current_maker("cpu").items() if value != before[name]} == {"bringing"}


def test_a_checkout_that_is_not_installed_has_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(versions, "version", missing)
    monkeypatch.setattr(versions, "_installed_version", versions._installed_version.__wrapped__)  # not cached
    assert current_maker("cpu")["featcal"].startswith(f"{featcal.__version__}, ")
    assert "torch" not in current_maker("cpu")


def test_code_of_featcal_itself_tells_runs_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout changes it between versions."""
    before = current_maker("cpu")
    monkeypatch.setattr(history, "code_digest", lambda: "0" * 64)
    after = current_maker("cpu")
    assert after["featcal"] == f"{before['featcal'].partition(',')[0]}, {'0' * 12}"
    assert {name for name, value in after.items() if value != before[name]} == {"featcal"}


OWN = "import featcal\n@featcal.merger('{name}', 'of a test')\ndef merge(base, vectors):\n    return base * {factor}\n"


def test_code_of_a_method_that_was_imported_tells_runs_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file, found = tmp_path / "merger_of_a_test.py", []
    for factor in (1, 2):
        file.write_text(OWN.format(name="merger-of-a-test", factor=factor))
        monkeypatch.delitem(sys.modules, file.stem, raising=False)
        importlib.invalidate_caches()
        importlib.import_module(file.stem)
        found.append(current_maker("cpu")[file.stem])
    assert found == [hashlib.sha256(file.name.encode() + OWN.format(name="merger-of-a-test", factor=factor).encode())
                     .hexdigest()[:12] for factor in (1, 2)]  # fmt: skip


def test_a_method_without_a_file_is_never_taken_for_another() -> None:
    """A notebook has methods in no file, and they are written anew there."""
    found = []
    for factor in (1, 2):
        exec(OWN.format(name="cell-of-a-test", factor=factor), {"__name__": "a_notebook"})
        found.append(current_maker("cpu")["a_notebook"])
    assert found[0] != found[1]
