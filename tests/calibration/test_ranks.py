"""Several processes share one calibration: they give what one gives, read every expert once, and end together."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from clip_config import clip_config
from lanes import rows
from open_clip_models import suite_as_open_clip
from several import apart, calibrated, check_alike, killed_once, record, run_command_in_ranks, run_ranks
from tiny_clip import in_float64
from tiny_text import write_text_suite
from torch import Tensor

from featcal.calibration.calibrate import calibrate_to_folder, config_for
from featcal.export import record_facts
from featcal.export.merge import merge_to_folder
from featcal.family.opening import Family, open_family
from featcal.formats import checkpoint
from featcal.formats.weights import Weights, WrappedWeights
from featcal.suite.calibration_options import RECIPES
from featcal.suite.recipe import MergeRecipe
from featcal.suite.schema import Suite, load_suite
from featcal.system.distributed import current_ranks, owners_of, parts, teams_of
from featcal.system.errors import InputError

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
CONFIG = clip_config(samples=8)
MORE: dict[str, dict[str, float]] = {"paper": {}, "refined": {"beta": 0.5}, "informed": {"beta": 0.5, "mu": 0.1}}
"""What a recipe has beside the paper's options."""


@dataclass(frozen=True)
class Spoiled(WrappedWeights):
    """A model that cannot be read."""

    under: Weights

    @property
    def label(self) -> str:
        return self.under.label

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        raise InputError("no tensor today")


def in_float32(name: str) -> Family:
    """An embedded suite whose merged model is stored in float32: a rounding to float16 would hide what is compared."""
    suite = load_suite(name)
    assert isinstance(suite.merged, MergeRecipe)
    return open_family(suite.model_copy(update={"merged": suite.merged.model_copy(update={"dtype": "float32"})}), "cpu")


def test_tasks_and_samples_are_shared_evenly() -> None:
    for tasks in range(1, 8):
        names = [str(task) for task in range(tasks)]
        for size in range(1, 12):
            teams = teams_of(names, size)
            assert list(teams) == names
            held = [[task for task in names if rank in teams[task]] for rank in range(size)]
            assert min(map(len, held)) >= 1
            if tasks >= size:
                assert {len(team) for team in teams.values()} == {1}
                assert max(map(len, held)) - min(map(len, held)) <= 1
            else:
                assert {len(own) for own in held} == {1}
                assert max(map(len, teams.values())) - min(map(len, teams.values())) <= 1
    assert parts(7, 3) == [(0, 3), (3, 5), (5, 7)]


def test_owners_have_about_the_same_to_do() -> None:
    costs = [11.0, 1.0, 7.0, 3.0, 3.0, 2.0, 9.0]
    for size in (1, 2, 3, 4):
        load = [
            sum(c for c, owner in zip(costs, owners_of(costs, size), strict=True) if owner == r) for r in range(size)
        ]
        assert max(load) - min(load) <= max(costs) / 2
        assert max(load) <= max(sum(costs) / size * 4 / 3, max(costs))  # the bound of longest-first


LEAVE_GROUP = """
import os
from pathlib import Path
from featcal.system.distributed import join_process_group
with join_process_group("cpu") as ranks:
    import torch.distributed.nn.functional
    ranks.all_gather(0)  # who leaves sooner cuts off one that is not connected yet
print([task.read_text() for task in Path("/proc/self/task").glob("*/comm") if "gloo" in task.read_text()])
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are read from /proc")
def test_no_thread_outlives_the_group() -> None:
    """One that lets a tensor go while Python shuts down would abort the process, and with it the run."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LEAVE_GROUP],
            env=os.environ | shared | {"RANK": rank},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    assert [rank.communicate(timeout=120)[0] for rank in ranks] == ["[]\n", "[]\n"]


@pytest.mark.parametrize("recipe", rows(RECIPES, quick=(), slow=("paper", "informed")))
def test_whole_tasks_give_the_same_bits(recipe: str, tiny: Family, tmp_path: Path) -> None:
    """Sums over tasks are float64, so that their order shows in no stored tensor."""
    config = replace(CONFIG, recipe=recipe, **MORE[recipe])
    alone, both = check_alike(tiny, config, tmp_path, (2,), most=0)
    assert "ranks" not in alone
    assert [one["tasks"] for one in both["ranks"]] == [{"pets": 8}, {"signs": 8}]


@pytest.mark.parametrize("recipe", rows(RECIPES, quick=(), slow=("paper", "informed")))
def test_tasks_that_ranks_share(recipe: str, tiny64: Family, tmp_path: Path) -> None:
    """Weight and targets of a task are of all its samples, wherever they are: two ranks and one, then two each."""
    config = replace(CONFIG, recipe=recipe, **MORE[recipe], batch_size=3)
    found = check_alike(tiny64, config, tmp_path, (3, 4), most=1e-12)
    assert [one["tasks"] for one in found[1]["ranks"]] == [{"pets": 4}, {"pets": 4}, {"signs": 8}]
    assert [one["tasks"] for one in found[2]["ranks"]] == [{"pets": 4}, {"pets": 4}, {"signs": 4}, {"signs": 4}]


@pytest.mark.slow
def test_open_clip(tiny_suite_file: Path, tmp_path: Path) -> None:
    """Query, key and value maps lie in one tensor, and in the last block they have two owners."""
    family = open_family(load_suite(suite_as_open_clip(tiny_suite_file, tmp_path / "open_clip")), "cpu")
    check_alike(family, CONFIG, tmp_path / "float32", (2,), most=0)
    check_alike(in_float64(family), CONFIG, tmp_path / "float64", (4,), most=1e-12)


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("suite", ["clip-mini", "t5-mini", "lm-mini"])
def test_embedded_suites(suite: str, recipe: str, tmp_path: Path) -> None:
    """A small λ makes 1e-16 of the sums 1e-10 of the first block, and float32 features 3e-6 (T5, λ 1e-5; CLIP,
    λ 3e-3) to 1e-5 (lm-mini, λ 1e-3) of later ones: those of float64 do not."""
    family = in_float32(suite)
    config = config_for(family, samples=32, recipe=recipe)
    if config.lam < 0.01:
        check_alike(family, config, tmp_path / "float32", (2, 4), most=3e-5)
        family = in_float64(family)
    check_alike(family, config, tmp_path, (2, 4))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "recipe"), [("t5", "informed"), ("llama", "refined")])
def test_text(kind: str, recipe: str, tmp_path: Path) -> None:
    """Padding, and two stages of blocks."""
    family = in_float64(open_family(load_suite(write_text_suite(tmp_path / "suite", kind)), "cpu"))
    config = config_for(family, recipe=recipe, lam=0.05, batch_size=3)
    check_alike(family, config, tmp_path / "ranks", (2, 3), most=1e-10)


@pytest.mark.slow
def test_a_rank_alone_is_one_process(tiny: Family, tmp_path: Path) -> None:
    alone, _ = check_alike(tiny, CONFIG, tmp_path, (1,), most=0)
    assert "ranks" not in alone
    assert "ranks" not in record(tmp_path / "1")


def calibrate_and_note_reads(suite: Suite, place: Path) -> None:
    """In a process of its own, which writes down the files it opens."""

    def noted(given: Any) -> Any:
        def note(file: Path, *more: Any) -> Any:
            with (place / f"read by {os.getpid()}").open("a") as log:
                log.write(f"{file}\n")
            return given(file, *more)

        return note

    family = open_family(suite, "cpu")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checkpoint, "open_file", noted(checkpoint.open_file))
        patched.setattr(record_facts, "sha256", noted(record_facts.sha256))
        calibrate_to_folder(family, CONFIG, place / "out")


def test_every_expert_is_read_by_one_rank(tiny: Family, tmp_path: Path) -> None:
    """Counted where files are opened for their tensors, hashes and lineage included; a merged model in a folder."""
    merge_to_folder(tiny, "task-arithmetic", 0.5, tmp_path / "merged")
    suite = tiny.suite.model_copy(update={"merged": str(tmp_path / "merged")})
    run_ranks(2, partial(calibrate_and_note_reads, suite, tmp_path), tmp_path / "logs").check()
    read = [set(file.read_text().splitlines()) for file in tmp_path.glob("read by *")]
    experts = [{file for file in own if "experts" in file} for own in read]
    assert len(experts) == 2
    assert all(len(own) == 1 for own in experts)
    assert not experts[0] & experts[1]


@pytest.mark.slow
def test_bytes_that_ranks_exchange(tiny: Family, tmp_path: Path) -> None:
    """Whatever is sent is received; what a rank reads of its own expert is the lineage's matrices and the tower."""
    ended = calibrated(tiny, CONFIG, tmp_path / "out", 2)
    ended.check()
    ranks = record(tmp_path / "out")["ranks"]
    assert ranks[0]["sent_bytes"] == ranks[1]["received_bytes"] > 0
    assert ranks[1]["sent_bytes"] == ranks[0]["received_bytes"] > 0
    half = sum(  # a recipe: of the other task's expert half of what both merge
        info.dtype.itemsize * torch.Size(info.shape).numel()
        for name, info in tiny.experts["pets"].info.items()
        if name in tiny.adapter.tower
    )
    for rank, other in ((0, "signs"), (1, "pets")):
        assert 0 < ranks[rank]["read_bytes"][f"expert '{other}'"] < 0.7 * half


def die(at: str, rank: int, how: int, label: str, done: int, total: int) -> None:
    """A progress, but for its first arguments, that kills one rank in front of a block."""
    if current_ranks().rank == rank and f"{label} {done}" == at:
        os.kill(os.getpid(), how)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_others_and_the_run_resumes(victim: int, tiny: Family, tmp_path: Path) -> None:
    dying = partial(die, "calibrating 2", victim, signal.SIGKILL)
    ended = calibrated(tiny, CONFIG, tmp_path / "out", 2, progress=dying)
    assert ended.status[victim] == -signal.SIGKILL
    assert ended.status[1 - victim] == 1
    assert "InputError: another process of this run has ended" in ended.said[1 - victim]
    assert "--resume" in ended.said[1 - victim]
    assert ended.seconds < 8
    assert not (tmp_path / "out").exists()
    calibrate_to_folder(tiny, CONFIG, tmp_path / "whole")
    shutil.copytree(tmp_path / "out.partial", tmp_path / "again.partial")
    calibrate_to_folder(tiny, CONFIG, tmp_path / "out", resume=True)  # with one process
    assert apart(tmp_path / "whole", tmp_path / "out") == 0
    again = calibrated(tiny, CONFIG, tmp_path / "again", 2, resume=True)
    assert again.status == [0, 0], again.said
    assert apart(tmp_path / "whole", tmp_path / "again") == 0


@pytest.mark.slow
def test_one_rank_says_why_all_end(tiny: Family, tmp_path: Path) -> None:
    """Samples that one rank alone reads are wrong: it says so, the others end without a word."""
    spoiled = replace(tiny, experts={**tiny.experts, "signs": Spoiled(tiny.experts["signs"])})
    ended = calibrated(spoiled, CONFIG, tmp_path / "out", 3)
    assert ended.status == [1, 1, 1]
    assert [one for one in ended.said if one] == ["InputError: no tensor today"]


@pytest.mark.slow
def test_sigterm_ends_all_with_a_message(tiny: Family, tmp_path: Path) -> None:
    """As torchrun or a job scheduler sends it."""
    dying = partial(die, "calibrating 1", 1, signal.SIGTERM)
    ended = calibrated(tiny, CONFIG, tmp_path / "out", 2, progress=dying)
    assert ended.status == [1, 1]
    assert "stopped by SIGTERM" in ended.said[1]
    assert not ended.said[0]


@pytest.mark.slow
def test_fewer_samples_than_ranks(tiny: Family, tmp_path: Path) -> None:
    ended = calibrated(tiny, replace(CONFIG, samples=1), tmp_path / "out", 3)
    assert ended.status == [1, 1, 1]
    assert "task 'pets' has 1 samples for 2 processes; start fewer" in "".join(ended.said)


@pytest.mark.slow
def test_memory_limit(tiny: Family, tmp_path: Path) -> None:
    """Every rank has its own limit; what does not fit is said once."""
    calibrate_to_folder(tiny, CONFIG, tmp_path / "whole")
    ended = calibrated(tiny, CONFIG, tmp_path / "out", 2, max_memory=8 * 2**30)
    ended.check()
    assert apart(tmp_path / "whole", tmp_path / "out") == 0
    ended = calibrated(tiny, CONFIG, tmp_path / "small", 2, max_memory=2**20)
    assert ended.status == [1, 1]
    assert sum("--max-memory: one block needs" in one for one in ended.said) == 1


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


@pytest.mark.parametrize("size", rows(["1", "2"], quick=(), slow=("2",)))
def test_torchrun(size: str, tiny: Family, tiny_suite_file: Path, tmp_path: Path) -> None:
    """The command as users give it: rank 0 alone prints, one process is as without torchrun."""
    out = tmp_path / "out"
    words = ["calibrate", str(tiny_suite_file), "--samples", "8", "--device", "cpu", "--json", "--out", str(out)]
    done = subprocess.run([*TORCHRUN, size, "-m", "featcal", *words], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["out"] == str(out)
    calibrate_to_folder(tiny, config_for(tiny, samples=8), tmp_path / "none")
    assert apart(tmp_path / "none", out) == 0
    assert len(record(out).get("ranks", [1])) == int(size)
    assert ("ranks" in record(out)) == (size == "2")


@pytest.mark.slow
def test_a_command_that_fails_says_so_once(tiny_suite_file: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    ended = run_command_in_ranks(2, ["calibrate", tiny_suite_file, "--out", tmp_path / "out"], tmp_path / "logs")
    assert all(ended.status)
    (said,) = [one for one in ended.said if one]
    assert said.count("featcal: ") == 1
    assert "exists already" in said


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="a rank is found by its environment")
def test_torchrun_of_which_a_process_is_killed(tmp_path: Path) -> None:
    """torchrun ends with an error, one line of featcal's says what to do, and one process then ends the run."""
    featcal = ["-m", "featcal", "calibrate", "clip-mini", "--samples", "32", "--device", "cpu", "--out"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    first = tmp_path / "out.partial" / "blocks" / "vision_model.encoder.layers.0.safetensors"
    killed = killed_once([sys.executable, *torchrun, *featcal, str(tmp_path / "out")], first, rank=1)
    assert killed.status == [1]
    assert killed.said[0].count("featcal: ") == 1
    assert "another process of this run has ended" in killed.said[0]
    assert not (tmp_path / "out").exists()
    family = open_family(load_suite("clip-mini"), "cpu")
    for name in ("out", "whole"):
        calibrate_to_folder(family, config_for(family, samples=32), tmp_path / name, resume=name == "out")
    assert apart(tmp_path / "whole", tmp_path / "out") == 0
