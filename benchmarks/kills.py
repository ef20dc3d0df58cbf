"""Kills at random moments: `python benchmarks/kills.py --kills 200`.

Calibrations, merges, exports, conversions and a study of a suite run in a process each, which is killed (SIGKILL) at a
moment that is drawn over the length of an undisturbed run. Whatever transformers, open_clip or featcal then take for a
model must be the finished one, weights and configuration to the last bit; the second run must end as the undisturbed
one. Prints JSON: how many kills hit a run, by what was running and what lay there; fails with the first violation.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import measure
import torch
from safetensors import SafetensorError

from featcal.calibration.calibrate import calibrate_to_folder
from featcal.export.change_layout import convert
from featcal.export.merge import merge_to_folder
from featcal.export.write import rewrite
from featcal.family.opening import Family, open_family
from featcal.formats.hub import RECORD_FILE
from featcal.formats.locate import locate
from featcal.models.families.registry import adapter_for
from featcal.session.session import Session
from featcal.studies.compare import compare_methods
from featcal.studies.plan import StudyPlan
from featcal.studies.runner import Views
from featcal.studies.store import Rows
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.schema import load_suite
from featcal.suite.views import EvaluationSamples
from featcal.system.atomic_files import put_new
from featcal.system.errors import InputError

SAMPLES = 4
Write = Callable[[Family, Path, bool], Any]
"""Writes something of a family at a place; the last argument says that a run before this one was killed."""
STUDY = "study.json"
COSTS = ("seconds", "stages", "peak_bytes", "peak_rss_bytes")
"""What records and rows say of a run that is another one's each time."""


def calibrated(family: Family, out: Path, again: bool) -> None:
    calibrate_to_folder(family, CalibrationConfig(samples=SAMPLES), out, resume=again)


def merged(family: Family, out: Path, again: bool) -> None:
    merge_to_folder(family, "task-arithmetic", 0.3, out)


def exported(family: Family, out: Path, again: bool) -> None:
    rewrite(family.container.folder, out)


def converted(family: Family, out: Path, again: bool) -> None:
    convert(family.container.folder, out, "open_clip")


def studied(family: Family, out: Path, again: bool) -> None:
    """Three models in one table, with the rows of it that are kept."""
    on = Views(EvaluationSamples(SAMPLES, "test"), EvaluationSamples(SAMPLES))
    plan = StudyPlan(["merged", "anchor:rho=2", "calibrated"], (42,), SAMPLES, on, Rows(out / "rows"))
    study = compare_methods(Session(family), plan)
    failures = [row.found.failure for row in study.rows if row.found.failure]
    assert not failures, failures
    put_new(out / STUDY, study.text())


WRITES: Mapping[str, Write] = {write.__name__: write for write in (calibrated, merged, exported, converted, studied)}


def in_a_process(work: Callable[[], object], seconds: float | None = None) -> int:
    """Run it in a child of this process, killed after so many seconds; how that ended, as `waitpid` says it."""
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)  # torch's pool is made anew by its first user here: two at once would race
            work()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.__stderr__, flush=True)
            os._exit(1)
        os._exit(0)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def loadable(folder: Path) -> bool:
    """Whether transformers, open_clip or featcal takes a folder for a model."""
    import open_clip
    from transformers import AutoModel

    for load in (AutoModel.from_pretrained, lambda place: open_clip.create_model(f"local-dir:{place}")):
        try:
            load(folder)
        except (OSError, ValueError, RuntimeError, SafetensorError):
            continue
        return True
    try:
        found = locate(str(folder), Path.cwd(), "model")
        adapter_for(found.config, found.names, torch.device("cpu"), found.label)
    except InputError:
        return False
    return True


def content(folder: Path) -> dict[str, Any]:
    """Files by name, the record without what the run cost; of a study its rows, without costs too."""
    if (folder / STUDY).exists():
        rows = json.loads((folder / STUDY).read_text())["rows"]
        return {str(number): _without_costs(row) for number, row in enumerate(rows)}
    found: dict[str, Any] = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    if RECORD_FILE in found:
        found[RECORD_FILE] = _without_costs(json.loads(found[RECORD_FILE]))
    return found


def _without_costs(said: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in said.items() if name not in COSTS}


def same_model(found: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    """Whether weights and configurations are those of the finished model; while it is verified it has no card yet."""
    named = (".safetensors", ".bin", ".index.json", "config.json")
    read = [{name: one for name, one in files.items() if name.endswith(named)} for files in (found, expected)]
    return read[0] == read[1]


def require_none_loads(folders: Sequence[Path], expected: Mapping[str, Any]) -> None:
    """Loading starts threads, so this is for a process of its own: a child of one with threads may have none."""
    others = [str(one) for one in folders if loadable(one) and not same_model(content(one), expected)]
    assert not others, f"{others} can be loaded, and are other models"


def trial(name: str, family: Family, place: Path, seconds: float, expected: Mapping[str, Any]) -> str:
    """One run that is killed after so many seconds, and the one after it; what lay there between the two.

    Raises:
        AssertionError: something that is no whole output is a model to somebody, the second run ends otherwise, or the
            first one fails by itself.
    """
    out, write = place / "out", WRITES[name]
    ended = in_a_process(lambda: write(family, out, False), seconds)
    # A run that failed by itself was not hit; what it leaves behind would count as what a kill leaves.
    assert os.WIFSIGNALED(ended) or os.WEXITSTATUS(ended) == 0, f"{name}: the run failed before it was killed"
    whole = (out / STUDY).exists() if name == "studied" else out.exists()
    if whole:
        assert content(out) == expected, f"{name}, killed after {seconds:.3f} s: the output is not whole"
        return "done before" if os.WIFEXITED(ended) else "whole"
    left = sorted(one for one in place.rglob("*") if one.is_dir())
    assert in_a_process(lambda: require_none_loads(left, expected)) == 0, f"{name}, killed after {seconds:.3f} s"
    assert in_a_process(lambda: write(family, out, True)) == 0, f"{name}, after {seconds:.3f} s: no second run"
    assert content(out) == expected, f"{name}, killed after {seconds:.3f} s: the second run gives something else"
    assert [*place.iterdir()] == [out], f"{name}, killed after {seconds:.3f} s: {[*place.iterdir()]} is left"
    return "something half done" if left else "nothing"


def trials(family: Family, folder: Path, kills: int, seed: int) -> Iterator[tuple[str, str]]:
    """So many kills over all kinds of output, in turn, at moments drawn by the seed: what was killed, and what lay
    there then."""
    dice, lengths, expected = random.Random(seed), dict[str, float](), dict[str, Mapping[str, Any]]()
    for name, write in WRITES.items():
        for which in ("first", "again"):  # the first one finds no file in the system's cache
            place = folder / which / name
            place.parent.mkdir(parents=True, exist_ok=True)
            started = time.monotonic()
            assert in_a_process(lambda: write(family, place, False)) == 0, name  # noqa: B023
            lengths[name], expected[name] = time.monotonic() - started, content(place)
    for number in range(kills):
        name = [*WRITES][number % len(WRITES)]
        place = folder / str(number)
        place.mkdir()
        yield name, trial(name, family, place, dice.uniform(0, lengths[name]), expected[name])
        shutil.rmtree(place)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", default="clip-mini")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # a child of a process with several could wait for threads that it does not have
    family = open_family(load_suite(options.suite), "cpu")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FEATCAL_CACHE"] = str(Path(folder) / "cache")  # what is looked at is counted there
        started = time.monotonic()
        found: dict[str, Counter[str]] = {name: Counter() for name in WRITES}
        try:
            for name, what in trials(family, Path(folder) / "kills", options.kills, options.seed):
                found[name][what] += 1
        finally:
            measure.show(
                {"suite": options.suite, "kills": options.kills, "seed": options.seed, "found": found}
                | {"seconds": time.monotonic() - started, "machine": measure.machine()}
            )


if __name__ == "__main__":
    main()
