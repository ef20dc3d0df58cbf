"""A process that is killed at any of its file operations: what lies there then is no model to anybody, and the next run
ends as if nothing had happened."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from featcal.calibration.calibrate import calibrate_to_folder
from featcal.calibration.config import CalibrationConfig
from featcal.errors import InputError
from featcal.export.change_layout import convert
from featcal.export.write import rewrite
from featcal.family import Family
from featcal.formats.locate import locate
from featcal.merging import merge_to_folder
from featcal.models.architectures import adapter_for

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")]
CONFIG = CalibrationConfig(samples=4)
OPERATIONS = ("open", "os.rename", "os.mkdir", "os.link", "os.remove", "os.rmdir", "os.chmod", "shutil.rmtree")
Write = Callable[[Family, Path, bool], Any]


def calibrated(tiny: Family, out: Path, again: bool) -> None:
    calibrate_to_folder(tiny, CONFIG, out, resume=again)


def merged(tiny: Family, out: Path, again: bool) -> None:
    merge_to_folder(tiny, "task-arithmetic", 0.3, out)


def exported(tiny: Family, out: Path, again: bool) -> None:
    rewrite(tiny.container.folder, out)


def converted(tiny: Family, out: Path, again: bool) -> None:
    convert(tiny.container.folder, out, "open_clip")


def in_a_process(work: Callable[[], object]) -> int:
    """Run it in a child of this process; how that ended, as `waitpid` says it."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            print(error, file=sys.__stderr__, flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def killed_at(place: Path, count: int, work: Callable[[], object]) -> Callable[[], object]:
    """The same work, killed before its operation number `count` below `place`."""

    def doomed() -> None:
        seen = 0

        def audit(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal seen
            if event in OPERATIONS and str(arguments[0]).startswith(str(place)):
                if seen == count:
                    os.kill(os.getpid(), signal.SIGKILL)
                seen += 1

        sys.addaudithook(audit)
        work()

    return doomed


def loadable(folder: Path) -> bool:
    """Whether transformers or featcal takes a folder for a model."""
    from transformers import AutoModel

    try:
        AutoModel.from_pretrained(folder)
    except (OSError, ValueError):
        pass
    else:
        return True
    try:
        found = locate(str(folder), Path.cwd(), "model")
        adapter_for(found.config, found.names, torch.device("cpu"), found.label)
    except InputError:
        return False
    return True


def content(folder: Path) -> dict[str, bytes]:
    """Files by name, but for the record, which says how long it took."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "featcal.json"}


@pytest.mark.parametrize("write", [calibrated, merged, exported, converted])
def test_killed_at_every_file_operation(write: Write, tiny: Family, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    write(tiny, whole, False)
    expected, points = content(whole), 0
    while True:
        place = tmp_path / f"at {points}"
        place.mkdir()
        out = place / "out"
        ended = in_a_process(killed_at(place, points, lambda: write(tiny, out, False)))  # noqa: B023
        if os.WIFEXITED(ended):
            assert os.WEXITSTATUS(ended) == 0
            break
        assert os.WTERMSIG(ended) == signal.SIGKILL
        if out.exists():
            assert content(out) == expected, f"killed at operation {points}"
        else:
            assert not any(map(loadable, place.iterdir())), f"killed at operation {points}"
            assert in_a_process(lambda: write(tiny, out, True)) == 0, f"after a kill at operation {points}"  # noqa: B023
            assert content(out) == expected, f"resumed after a kill at operation {points}"
            assert list(place.iterdir()) == [out]
        points += 1
    assert points >= 8
