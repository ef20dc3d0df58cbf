"""Token states within a budget: the same numbers, whatever lies in files, and nothing left behind."""

from __future__ import annotations

import json
from pathlib import Path
from threading import current_thread, main_thread

import pytest
import torch
from pretended_device import PretendedDevice
from tiny_clip import TASKS
from tiny_text import write_text_suite

from featcal import InputError, calibrate_to_folder, load_suite, open_family
from featcal.calibration.calibrate import config_for
from featcal.calibration.memory import MemoryLimits, block_bytes, device_budget, state_budget
from featcal.family.opening import Family
from featcal.models.activations import ActivationStore
from featcal.models.adapter import Block, Call
from featcal.models.lane import ModelStream, WalkCache, _bytes
from featcal.models.walk import BlockwiseForward
from featcal.system.progress import SLACK, Timing, rss_bytes


def call(seed: int) -> Call:
    state = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(seed))
    return Call((state, None, torch.ones(1, 2, 3, 3), state + 1), {"mask": torch.ones(2, 3)})


STATES = 2 * 2 * 3 * 4 * 4 + 4 * 2 * 3 * 3 + 4 * 2 * 3
"""Bytes of a call: two states, a position bias and a mask."""


def test_calls_come_back_bit_for_bit(tmp_path: Path) -> None:
    store = ActivationStore(budget=STATES, folder=tmp_path)
    held = store.hold(call(seed) for seed in range(3))
    assert store.resident == STATES
    assert store.spilled == 2 * STATES
    for seed, found in enumerate(held):
        expected = call(seed)
        assert found.hidden_state.equal(expected.hidden_state)
        assert found.args[3].equal(expected.args[3])
        assert found.args[1] is None
        assert found.args[2].equal(expected.args[2])
        assert found.kwargs["mask"].equal(expected.kwargs["mask"])


def test_replacing_frees_memory_and_files(tmp_path: Path) -> None:
    store = ActivationStore(budget=0, folder=tmp_path)
    held = store.hold([call(0)])
    held.put(0, call(1))
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1
    assert held[0].hidden_state.equal(call(1).hidden_state)
    held.put(1, call(2))
    assert held[1].hidden_state.equal(call(2).hidden_state)
    held.clear()
    assert not list(tmp_path.rglob("*.safetensors"))
    assert len(held) == 0
    roomy = ActivationStore(budget=2**20)
    kept = roomy.hold([call(0)])
    kept.put(1, call(1))
    assert roomy.resident == 2 * STATES
    kept.put(0, Call((torch.zeros(1, 1, 4),), {}))
    assert roomy.resident == STATES + 16
    kept.clear()
    assert roomy.resident == 0


def test_files_are_gone_with_the_store(tmp_path: Path) -> None:
    store = ActivationStore(budget=0, folder=tmp_path)
    store.hold([call(0)])
    assert list(tmp_path.iterdir())
    del store
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("featcal.models.activations.save_file", refuse)
    with pytest.raises(InputError, match=r"cannot store token states .*No space left"):
        ActivationStore(budget=0, folder=tmp_path).hold([call(0)])


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        ("t5", "paper"),
        pytest.param("llama", "informed", marks=pytest.mark.slow),
        pytest.param("llama", "paper", marks=pytest.mark.slow),
        pytest.param("t5", "refined", marks=pytest.mark.slow),
    ],
)
def test_a_budget_changes_no_bit(kind: str, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = open_family(load_suite(write_text_suite(tmp_path / "suite", kind)), "cpu")
    config = config_for(family, batch_size=3, recipe=recipe)
    free = calibrate_to_folder(family, config, tmp_path / "free")
    monkeypatch.setattr("featcal.calibration.calibrate.state_budget", lambda *_: 2000)
    monkeypatch.setattr("featcal.calibration.calibrate.can_reload", lambda *_: True)  # one file, to compare bytes
    bound = calibrate_to_folder(family, config, tmp_path / "bound", max_memory=1)
    assert free["spilled_bytes"] == 0
    assert bound["spilled_bytes"] > 0
    files = [tmp_path / out / "model.safetensors" for out in ("free", "bound")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert json.loads((tmp_path / "bound" / "featcal.json").read_text())["relative_drift"] == free["relative_drift"]


@pytest.mark.parametrize("recipe", ["paper", "refined", "informed"])
def test_nothing_of_a_block_is_left_in_the_budget(
    recipe: str, tiny: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traces of the experts are held until their block is solved, and counted no longer."""
    store = ActivationStore(2**30, tmp_path)
    monkeypatch.setattr("featcal.calibration.calibrate._store", lambda *_: store)
    left: list[int] = []

    def note(_: str, done: int, total: int) -> None:
        left.append(store.resident)

    config = config_for(tiny, recipe=recipe, samples=4)
    calibrate_to_folder(tiny, config, tmp_path / "out", max_memory=2**30, progress=note)
    *behind, final = left
    assert len({*behind}) == 1
    assert 0 < final < behind[0]


@pytest.mark.parametrize(("budget", "ahead"), [(None, True), (2**30, False)])
def test_an_expert_is_read_ahead_where_no_budget_bounds_memory(
    tiny: Family, monkeypatch: pytest.MonkeyPatch, budget: int | None, ahead: bool
) -> None:
    """The tensors of a second one are memory of which a budget knows nothing."""
    elsewhere, tensors = list[bool](), ModelStream.tensors

    def noting(lane: ModelStream, block: Block, modules: None) -> dict[str, torch.Tensor]:
        elsewhere.append(current_thread() is not main_thread())
        return tensors(lane, block, modules)

    monkeypatch.setattr(ModelStream, "tensors", noting)
    passes = {task: tiny.expert_pass(tiny.samples(task, "test", 2, 0), 2) for task in TASKS}
    walk = BlockwiseForward(tiny.run(store=ActivationStore(budget)), "", passes, {})
    assert [task for task, _ in walk.experts_at(tiny.adapter.blocks()[0])] == list(TASKS)
    assert elsewhere == [False, ahead]


def test_what_a_walk_leaves_is_kept_as_a_whole_or_not_at_all() -> None:
    """A part of a lane's calls would be taken for all of them; room that is given back is given back once."""
    calls = [call(seed) for seed in range(4)]
    room = 2 * _bytes(calls[0])
    kept = WalkCache(room)
    for several, left, found in ((calls, room, None), (calls[:2], 0, calls[:2])):
        with kept.keeping("lane", [room], Timing()) as keep:
            for one in several:
                keep(one)
        assert (kept.left, kept.find("lane", [room])) == (left, found)


def test_a_limit_that_no_block_fits_into_is_refused(tmp_path: Path) -> None:
    family = open_family(load_suite(write_text_suite(tmp_path / "suite", "llama")), "cpu")
    with pytest.raises(
        InputError, match=r"--max-memory: one block needs about \d+\.\d\d GiB .* the limit is 0\.00 GiB"
    ):
        calibrate_to_folder(family, config_for(family), tmp_path / "out", max_memory=1000)
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["paper", "informed"])
def test_states_wait_in_memory_where_the_device_is_small(
    recipe: str, tiny_suite_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders, peaks = [tmp_path / "free", tmp_path / "bound"], list[int]()
    for out, limit in zip(folders, (None, 10**9), strict=True):
        with PretendedDevice("cuda:0") as card:
            family = open_family(load_suite(tiny_suite_file), "cuda:0")
            config = config_for(family, batch_size=2, recipe=recipe)
            start = card.restart_peak()
            with monkeypatch.context() as patched:
                patched.setattr("featcal.calibration.calibrate.device_budget", lambda *_: 0)
                calibrate_to_folder(family, config, out, max_memory=MemoryLimits(device=limit))
            peaks.append(card.peak - start)
    assert peaks[1] < 0.8 * peaks[0]
    assert (
        folders[0].joinpath("model.safetensors").read_bytes() == folders[1].joinpath("model.safetensors").read_bytes()
    )


def test_a_limit_of_the_device_is_what_it_leaves_or_a_clear_error(tiny_suite_file: Path, tmp_path: Path) -> None:
    working = 2**20
    with PretendedDevice("cuda:0") as card:
        held = torch.zeros(2**18, device="cuda:0")
        assert device_budget(card.device, working, 2**30) == 2**30 - held.nbytes - int(SLACK * working)
        with pytest.raises(
            InputError, match=r"--max-device-memory: one block needs about 0\.00 GiB .* the limit is 0\.00"
        ):
            device_budget(card.device, working, working)
    family = open_family(load_suite(tiny_suite_file), "cpu")
    with pytest.raises(InputError, match="--max-device-memory: cpu has no memory of its own; use --max-memory"):
        calibrate_to_folder(family, config_for(family), tmp_path / "out", max_memory=MemoryLimits(device=2**30))


def test_the_budget_is_what_the_limit_leaves(tmp_path: Path) -> None:
    family = open_family(load_suite(write_text_suite(tmp_path / "suite", "llama")), "cpu")
    limits = [rss_bytes() + extra * 2**20 for extra in (264, 392)]
    working = block_bytes(family.adapter.stages, family.merged, config_for(family), 64, 2)
    small, large = (state_budget(working, n) for n in limits)
    assert 0 < small < 64 * 2**20
    assert large - small == pytest.approx(128 * 2**20, abs=8 * 2**20)
