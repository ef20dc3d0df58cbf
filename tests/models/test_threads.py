"""Several threads at once: nobody's settings, numbers or models are disturbed by what another thread does or drops."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from clip_config import clip_config
from tiny_clip import write_suite
from tiny_text import write_text_suite
from torch import Tensor

from featcal import load_suite, open_family
from featcal.calibration.calibrate import calibrate_family, expert_passes
from featcal.drift.decomposition import decompose, measure_total_drift
from featcal.drift.ledger import TaskDrift
from featcal.drift.propagation import pull_back
from featcal.drift.streams import cross
from featcal.family.opening import Family
from featcal.models.activations import ActivationStore
from featcal.models.attention import attention
from featcal.models.compute import _takes_onednn, computing
from featcal.models.lane import StageEntrance, WalkCache
from featcal.system.progress import Progress, silent

pytestmark = pytest.mark.slow

KINDS = ("clip", "t5", "llama")
FEW = clip_config(samples=4, batch_size=4)


class Planted(Exception):
    """What the tests raise where a newer run of a page would end an older one."""


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Family]:
    """Three suites of three architectures, with every tensor in memory as the app has them."""
    opened = {}
    for kind in KINDS:
        root = tmp_path_factory.mktemp(kind)
        file = write_suite(root) if kind == "clip" else write_text_suite(root / "suite", kind)
        opened[kind] = open_family(load_suite(file), device="cpu").resident()
    return opened


def process_settings() -> dict[str, Any]:
    """What a run might leave changed in the process: precisions, attention kernels, initialisers, defaults."""
    from transformers import PreTrainedModel
    from transformers.utils import logging

    backends: Any = torch.backends
    precisions = {
        (backend, op): torch._C._get_fp32_precision_getter(backend, op)  # type: ignore[attr-defined]
        for backend in ("cuda", "mkldnn")
        for op in ("all", "conv", "matmul")
    }
    kernels = [getattr(backends.cuda, f"{name}_sdp_enabled")() for name in ("flash", "mem_efficient", "math", "cudnn")]
    return {
        **precisions,
        "kernels": kernels,
        "initialisers": (torch.nn.init.normal_, PreTrainedModel.init_weights),
        "dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "logging": (logging.get_verbosity(), logging.is_progress_bar_enabled()),
    }


@pytest.fixture(autouse=True)
def _everything_as_before() -> Iterator[None]:
    before = process_settings()
    yield
    assert process_settings() == before


def together(*works: Callable[[], Any]) -> list[Any]:
    """What all of them return, each in a thread of its own."""
    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result() for future in [pool.submit(work) for work in works]]


def books(found: Mapping[str, TaskDrift]) -> list[Tensor]:
    """Every layer's share of the final drift of every task."""
    return [one.attribution.inner for one in found.values() if one.attribution is not None]


def overtaken_after(steps: int) -> Progress:
    """A progress callback that ends the work at its `steps`-th call."""
    left = [steps]

    def progress(label: str, done: int, total: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Planted

    return progress


def test_the_thread_that_entered_first_may_leave_first() -> None:
    inside = threading.Barrier(2)

    def run(patience: threading.Event | None, done: threading.Event) -> None:
        with computing:
            inside.wait(5)
            assert patience is None or patience.wait(5)
        done.set()

    for _ in range(3):
        left, last = threading.Event(), threading.Event()
        together(lambda left=left: run(None, left), lambda left=left, last=last: run(left, last))


def test_a_run_that_fails_to_begin_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> bool:
        raise Planted

    matmul: Any = torch.backends.cuda.matmul
    matmul.fp32_precision = "tf32"
    try:
        with monkeypatch.context() as failing:
            failing.setattr("featcal.models.compute._takes_onednn", fail)
            with pytest.raises(Planted), computing:
                pass
        assert matmul.fp32_precision == "tf32"
        with computing:
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = "none"


def test_float32_products_are_left_to_mkl_on_intel(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.backends.mkl.is_available():
        pytest.skip("this torch has no MKL")
    monkeypatch.setattr("featcal.models.compute.is_intel", lambda: True)
    assert _takes_onednn.__wrapped__() is False
    monkeypatch.setattr("featcal.models.compute.is_intel", lambda: False)
    asked = []
    monkeypatch.setattr("featcal.models.compute._replace", lambda before, *setting: asked.append(setting))
    _takes_onednn.__wrapped__()
    assert asked == [(torch.backends.mkldnn.matmul, torch.backends.mkldnn, "bf16")]


def test_two_threads_differentiate_through_attention_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the fused kernel, as where scores are many."""
    monkeypatch.setattr("featcal.models.attention._SMALL_SCORES", 0)
    generator = torch.Generator().manual_seed(0)
    state, drift, along = (torch.randn(4, 6, 8, generator=generator) for _ in range(3))

    def layer(hidden: Tensor) -> Tensor:
        time.sleep(0.001)  # lets the other thread in
        heads = hidden.unflatten(-1, (2, 4)).transpose(1, 2)
        return attention(heads.sin(), heads, heads).transpose(1, 2).flatten(2)

    def pull() -> tuple[Tensor, Tensor]:
        return pull_back(layer, state, drift, layer(state + drift) - layer(state), along)

    alone = pull()
    for _ in range(3):
        for pulled, missed in together(*[pull] * 4):
            assert torch.equal(pulled, alone[0])
            assert torch.equal(missed, alone[1])


def test_attribution_is_the_same_beside_another_suite(families: dict[str, Family]) -> None:
    def shares(kind: str) -> list[Tensor]:
        family = families[kind]
        return books(decompose(family.run(), family.merged, expert_passes(family, FEW), attribution=True))

    works = [lambda kind=kind: shares(kind) for kind in ("clip", "llama")]
    for alone, beside in zip([work() for work in works], together(*works), strict=True):
        assert all(torch.equal(one, two) for one, two in zip(alone, beside, strict=True))


def test_one_family_in_two_threads(families: dict[str, Family]) -> None:
    """The modules of an adapter are shared: walks through them take turns, whoever asks."""
    family = families["clip"]

    def run(lam: float) -> dict[str, Tensor]:
        weights = calibrate_family(family, replace(FEW, lam=lam, batch_size=2)).weights
        return weights.read(family.adapter.tower)

    alone = {lam: run(lam) for lam in (0.05, 0.5)}
    for lam, found in zip(alone, together(*[lambda lam=lam: run(lam) for lam in alone]), strict=True):
        assert all(torch.equal(tensor, alone[lam][name]) for name, tensor in found.items())


def test_an_abandoned_walk_is_closed_by_any_thread(families: dict[str, Family]) -> None:
    """A generator that was left half-way is closed by whichever thread collects it."""
    family = families["clip"]
    config = replace(FEW, batch_size=2)

    def arguments() -> tuple[Any, ...]:
        return family.run(), family.merged, expert_passes(family, config)

    def begin() -> Iterator[Any]:
        crossings = cross(*arguments())
        with family.adapter.in_use, torch.no_grad(), computing:
            for _ in range(5):
                next(crossings)
        return crossings

    alone = measure_total_drift(*arguments())
    left = together(begin, begin)
    left.clear()
    gc.collect()
    for task, found in measure_total_drift(*arguments()).items():
        assert torch.equal(found.model_features, alone[task].model_features)


def test_overtaken_walks_give_back_the_room_they_took(families: dict[str, Family]) -> None:
    family = families["clip"]
    config = replace(FEW, batch_size=2)
    kept = WalkCache(2**20)
    passes = expert_passes(family, config, kept)
    measure_total_drift(family.run(), family.merged, passes)
    needed = 2**20 - kept.left
    room = WalkCache(needed)
    passes = expert_passes(family, config, room)
    stage, block = family.adapter.stages[0], family.adapter.blocks()[0]
    for expert in passes.values():
        for _ in range(3):
            lane = expert.lane(ActivationStore())
            list(lane.enter(StageEntrance.from_model(stage, expert.weights, expert.compute)))
            taken = room.left
            walk = lane.walk(stage, block, lane.tensors(block))
            next(walk)
            assert room.left < taken
            walk.close()
            assert room.left == taken
    assert needed > 0


def test_models_loaded_by_several_threads_leave_the_library_as_it_was(tiny_suite_file: Path) -> None:
    """transformers replaces torch's initialisers while it loads; two overlapping loads must not leave them replaced."""
    from transformers import CLIPModel

    from featcal.formats.load_pretrained import load_complete

    folder = tiny_suite_file.parent / "base"
    for _ in range(5):
        together(*[lambda: load_complete(CLIPModel, folder)] * 4)
    weight = torch.empty(4)
    torch.nn.init.ones_(weight)
    assert torch.equal(weight, torch.ones(4))


def test_sessions_overtaken_at_random_neither_fail_nor_disturb_each_other(families: dict[str, Family]) -> None:
    """Six threads on three suites: no error but the planted one, and equal options give equal bits."""
    turns = {kind: threading.Lock() for kind in KINDS}  # kept passes are for one walk at a time, as in the app
    passes = {kind: expert_passes(family, FEW, WalkCache(2**24)) for kind, family in families.items()}

    def calibrated(kind: str, lam: float, progress: Progress) -> list[Tensor]:
        family = families[kind]
        with turns[kind]:
            result = calibrate_family(family, replace(FEW, lam=lam), experts=passes[kind], progress=progress)
        return list(result.weights.read(family.adapter.tower).values())

    def measured(kind: str, lam: float, progress: Progress) -> list[Tensor]:
        family = families[kind]
        arguments = family.run(progress), family.merged, expert_passes(family, FEW)
        if kind == "clip" and lam > 0.1:
            return books(decompose(*arguments, attribution=True))
        return [layer.drift for task in measure_total_drift(*arguments).values() for layer in task.layers]

    moves = [(work, kind, lam) for work in (calibrated, measured) for kind in KINDS for lam in (0.05, 0.2)]
    expected = [work(kind, lam, silent) for work, kind, lam in moves]
    finished, overtaken = [0] * 6, [0] * 6

    def session(number: int) -> None:
        chosen = random.Random(number)
        for position in chosen.sample(range(len(moves)), 6):
            work, kind, lam = moves[position]
            try:
                found = work(kind, lam, overtaken_after(chosen.choice((0, 1, 2, 99))))
            except Planted:
                overtaken[number] += 1
                continue
            finished[number] += 1
            assert all(torch.equal(one, two) for one, two in zip(found, expected[position], strict=True))

    together(*[lambda number=number: session(number) for number in range(6)])
    assert sum(finished) >= 6
    assert sum(overtaken) >= 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("options", [{}, {"scale": 0.3}, {"is_causal": True}, {"mask": True}])
def test_plain_attention_is_torchs_own_to_the_bit(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Without a mask fewer operations are done, and the same numbers come out of them."""
    own = dict(options)
    drawn = (torch.randn(3, 5, 2, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    query, key, value = (one.to(dtype).transpose(1, 2) for one in drawn)
    mask = torch.zeros(5, 5, dtype=dtype).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    given = mask if own.pop("mask", False) else None
    wanted = torch.ops.aten._scaled_dot_product_attention_math(query, key, value, given, **own)[0]
    found = attention(query, key, value, given, **own)
    assert torch.equal(found, wanted)
    assert found.stride() == wanted.stride()
