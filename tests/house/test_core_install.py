"""featcal with the packages of its core alone: commands on suites of texts work, and what is missing is said in one
sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from core_packages import link_core
from sources import ROOT

from featcal.system.extras import EXTRAS, say_missing
from featcal.system.resources import bundle_root

GIVEN = os.environ.get("FEATCAL_CORE_PYTHON", "")
"""A Python into which the wheel was installed, by `make core`; without it the packages of the core that are installed
here are linked into a folder of their own."""
TEXTS = (
    "check t5-mini",
    "drift t5-mini --attribution --output --eval-samples 8 --json",
    "calibrate t5-mini --samples 8 --recipe informed --out t5",
    "evaluate t5-mini --json",
    "evaluate t5-mini --card t5 --eval-samples 60 --json",
    "replay t5",
    "export t5 --out exported",
    "merge t5-mini --method tsv-m --out merged",
    "diagnose t5-mini --eval-samples 8",
    "diagnose merged --eval-samples 8 --base BUNDLE/t5-mini/base --expert sentiment=BUNDLE/t5-mini/experts/sentiment "
    "--expert grammar=BUNDLE/t5-mini/experts/grammar",
    "compare t5-mini --model merged --model calibrated:samples=8 --eval-samples 20",
    "drift lm-mini --eval-samples 8 --json",
    "calibrate lm-mini --samples 8 --out lm",
    "evaluate lm-mini --eval-samples 60",
    "check lm --for vllm",
    "study canary lm-mini",
)
"""Command lines that the core is enough for, in this order; data come from the folder BUNDLE."""
WITHOUT = {
    "app": "streamlit",
    "report t5-mini --out report.html": "plotly",
}
"""Command lines that miss a package before anything is read, with its name."""
LATER = {
    "diagnose . --out report.html": "plotly",
    "drift clip-mini": "pictures: torchvision",
    "check clip-mini": "pictures: torchvision",
    "calibrate t5-mini --quantize int8 --group-size 32 --out packed": "quantised weights: compressed_tensors",
    "drift parquet.yaml": "Parquet files: pyarrow",
    "drift hub.yaml": "data set 'owner/name': datasets",
    "check open_clip.yaml": "open_clip",
}
"""Those that miss one later."""


@dataclass(frozen=True)
class Core:
    """Featcal in an environment of the core alone."""

    folder: Path
    """Where commands run."""
    python: tuple[str, ...]
    path: tuple[Path, ...]

    def run(self, lines: Iterable[str]) -> tuple[list[tuple[int, str, str]], set[str]]:
        """Run command lines in one process; return exit status, stdout and stderr of each, and the packages that were
        imported."""
        words = [line.replace("BUNDLE", str(bundle_root() / "data")).split() for line in lines]
        script = ROOT / "tests" / "fixtures" / "command_lines.py"
        done = subprocess.run(
            [*self.python, "-P", str(script)],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, self.path)), "OMP_NUM_THREADS": "1"},
            input=json.dumps(words),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        results, packages = json.loads(done.stdout)
        return [tuple(one) for one in results], {*packages}


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Core:
    folder = tmp_path_factory.mktemp("core")
    if GIVEN:
        return Core(folder, (GIVEN,), ())
    links = tmp_path_factory.mktemp("packages")
    try:
        link_core(links)
    except OSError as error:
        pytest.skip(f"links cannot be made here: {error}")
    return Core(folder, (sys.executable, "-S"), (ROOT, links))


def missing(what: str) -> str:
    label, _, package = what.rpartition(": ")
    return say_missing(package, label)


def test_a_command_that_needs_an_extra_says_so_in_one_sentence(core: Core) -> None:
    results, _ = core.run(WITHOUT)
    assert [(status, err) for status, _, err in results] == [
        (1, f"featcal: {missing(package)}\n") for package in WITHOUT.values()
    ]


def suite_of(source: dict[str, Any], **more: Any) -> str:
    """Return a suite of one of t5-mini's tasks, with other calibration samples."""
    home = bundle_root() / "data" / "t5-mini"
    task = {"expert": str(home / "experts" / "sentiment"), "calibration": source}
    return yaml.safe_dump(
        {"name": "own", "base": str(home / "base"), "merged": {"method": "task-arithmetic"}, "tasks": {"one": task}}
        | more
    )


@pytest.mark.slow
def test_an_extra_that_is_missed_later_is_one_sentence_too(core: Core) -> None:
    text = {"input": "{text}", "target": "{label}"}
    (core.folder / "rows.parquet").write_bytes(b"PAR1")
    (core.folder / "rows.jsonl").write_text('{"text": "good", "label": "yes"}\n' * 4, encoding="utf-8")
    (core.folder / "weights.pt").write_bytes(b"")
    suites = {
        "parquet": suite_of({"parquet": "rows.parquet", **text}),
        "hub": suite_of({"hub": "owner/name", "split": "train", **text}),
        "open_clip": suite_of({"jsonl": "rows.jsonl", **text}, base="open_clip:ViT-B-32:weights.pt"),
    }
    for name, content in suites.items():
        (core.folder / f"{name}.yaml").write_text(content, encoding="utf-8")
    results, packages = core.run(LATER)
    assert packages & EXTRAS.keys() <= {"jinja2"}
    for (line, package), (status, _, err) in zip(LATER.items(), results, strict=True):
        assert status == 1, (line, err)
        assert err.count("is not installed") == 1, (line, err)
        assert missing(package) in err


@pytest.mark.slow
def test_suites_of_texts_need_no_extra(core: Core) -> None:
    results, packages = core.run(TEXTS)
    assert [(line, err) for line, (status, _, err) in zip(TEXTS, results, strict=True) if status] == []
    assert packages & EXTRAS.keys() <= {"jinja2"}  # torch brings it
    said = {line: json.loads(out) for line, (_, out, _) in zip(TEXTS, results, strict=True) if "--json" in line}
    scores, card = (said[line] for line in said if line.startswith("evaluate"))
    assert scores["average"] == pytest.approx(0.7005)  # as the suite's card says
    merged, calibrated, expert = (one["average"] for one in card["models"])
    assert merged + 0.1 < calibrated < expert
    residuals = [one["identity_residual"] for line in said if line.startswith("drift") for one in
                 said[line]["tasks"].values()]  # fmt: skip
    assert len(residuals) == 8
    assert max(residuals) < 1e-5
    assert "bit for bit" in results[TEXTS.index("replay t5")][1]
