"""Merges by methods that name no base, or whose rule is the base: `featcal diagnose FOLDER`, and what it says to do."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import Run, document
from mergekit_merges import EXPERTS, write_by_formula, write_models

pytestmark = pytest.mark.slow

SHARES: dict[str, tuple[float, ...]] = {
    "linear": (1 / 3, 1 / 3, 1 / 3),
    "slerp": (0.6, 0.4),
    "nuslerp": (0.6, 0.4),
    "karcher": (1 / 3, 1 / 3, 1 / 3),
}
"""Shares of whole models; the methods that keep lengths come near these."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("models"))


def diagnose(run: Run, folder: Path, *more: str) -> dict[str, Any]:
    found = document(run("diagnose", folder, "--eval-samples", "4", "--json", *more))
    return found | {"said": {one["about"]: one for one in found["sentences"]}}


@pytest.mark.parametrize("method", SHARES)
def test_without_a_base_it_is_told_what_it_is_made_of(run: Run, root: Path, method: str) -> None:
    found = diagnose(run, write_by_formula(root, method))
    assert found["said"]["state"]["numbers"] == {"broken": False, "files": False}
    assert "Its base is not known: no recipe names it" in found["said"]["origin"]["text"]
    expected = dict(zip(EXPERTS, SHARES[method], strict=False))
    assert found["contents"]["coefficients"] == pytest.approx(expected, abs=0.01)
    finals = [task["layers"][-1]["relative_drift"] for task in found["drift"]["tasks"].values()]
    after = found["said"]["repaired drift"]["numbers"]
    assert after["final"] == pytest.approx(sum(finals) / len(finals))
    assert "by the base" not in found["said"]["worst"]["text"]


def test_what_is_said_with_a_base_is_of_the_same_merge(run: Run, root: Path) -> None:
    folder = write_by_formula(root, "arcee_fusion")
    without, given = diagnose(run, folder), diagnose(run, folder, "--base", str(root / "base"))
    assert without["said"]["state"]["numbers"] == {"broken": False, "files": False}
    assert not {"origin", "absent", "far", "scale"} & given["said"].keys()
    assert given["drift"]["tasks"] == without["drift"]["tasks"]
    for name in ("left", "right"):
        (root / name / "README.md").write_text("---\nbase_model: ../base\n---\n")
    try:
        found = diagnose(run, folder)
        assert found["said"]["origin"]["numbers"] == {"base": str(root / "base")}
        assert found["contents"] == given["contents"]
    finally:
        for name in ("left", "right"):
            (root / name / "README.md").unlink()


def test_model_stock_of_experts_at_right_angles_is_the_base_by_its_rule(run: Run, root: Path) -> None:
    found = diagnose(run, write_by_formula(root, "model_stock"))
    assert found["said"]["state"]["numbers"] == {"broken": False, "files": False}
    assert abs(found["said"]["stock"]["numbers"]["share"]) < 0.1
    assert "absent" not in found["said"]
    command = found["said"]["next"]["numbers"]["command"]
    assert "--method task-arithmetic" in command
    assert "mergekit" not in command


def test_the_suite_that_is_written_calibrates_and_lowers_the_drift(
    run: Run, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_by_formula(root, "slerp")
    monkeypatch.chdir(tmp_path)
    code, out, err = run("diagnose", folder, "--eval-samples", "16", "--out", "found.html")
    assert code == 0, err
    assert yaml.safe_load(Path("found.yaml").read_text())["base"] is None
    page = Path("found.html").read_text()
    assert "not known" in page
    (next_line,) = (line for line in out.splitlines() if line.startswith("Next: "))
    command = shlex.split(next_line.rpartition(": ")[2])
    assert command[:3] == ["featcal", "calibrate", "found.yaml"]
    code, _, err = run(*command[1:])
    assert code == 0, err
    record = yaml.safe_load((Path(command[-1]) / "featcal.json").read_text())
    assert record["config"]["rho"] == 1
    assert "the base is not known" in record["notes"][0]
    finals = [document(run("drift", "found.yaml", "--model", one, "--json")) for one in ("merged", command[-1])]
    before, after = ([task["layers"][-1]["relative_drift"] for task in one["tasks"].values()] for one in finals)
    assert sum(after) < sum(before)
