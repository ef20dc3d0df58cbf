"""A session: everything is computed once, told apart by content, bounded in memory, and the same from every thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints
from weakref import ref

import pytest
import torch
import yaml
from clip_config import clip_config
from safetensors.torch import load_file, save_file
from tiny_clip import TASKS

from featcal import evaluate, load_suite, measure_drift
from featcal.calibration.calibrate import calibrate_family
from featcal.drift.ledger import DriftLedger
from featcal.family import opening
from featcal.family.opening import Family
from featcal.formats import model_files
from featcal.formats.weights import InMemory, Weights
from featcal.mergers.common.engine import RecipeWeights
from featcal.models.lane import ExpertPass, WalkCache
from featcal.samples.sources import Samples
from featcal.session import fits, measurements
from featcal.session.cache import Results, nbytes
from featcal.session.fingerprint import model_stamp, suite_stamp
from featcal.session.model_ref import IdentityKey, resolve_model
from featcal.session.open_suite import PASSES
from featcal.session.session import Session, open_session
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.views import DriftKeywords, DriftOptions, EvaluationSamples
from featcal.system.errors import InputError, NumericalError
from featcal.system.progress import silent

CONFIG = clip_config(samples=8)
FEW = EvaluationSamples(8)
RECIPE = "task-arithmetic:scale=0.2"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the modules of fits and measurements and the family's call, by name."""
    called: list[str] = []

    def counted(module: ModuleType, name: str) -> None:
        real = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    for name in ("calibrate_family", "measure_sources"):
        counted(fits, name)
    for name in ("decompose", "measure_total_drift", "score_model", "measure_weight_changes"):
        counted(measurements, name)
    counted(opening, "preview_samples")
    return called


def test_everything_is_computed_once(tiny: Family, calls: list[str]) -> None:
    def ask() -> list[object]:
        return [
            own.measure.drift(CONFIG, DriftOptions(8)),
            own.measure.drift(CONFIG, DriftOptions(8, own.split)),  # the same samples, named
            own.measure.features("merged", FEW),
            own.measure.scores("expert", FEW),
            own.fit.sources(CONFIG),
            own.measure.weight_changes(CONFIG),
            own.viewable_samples("pets", FEW),
            own.measure.layer_features("base", "pets", FEW),
            own.samples(FEW),
            own.fit.calibrate(CONFIG),
        ]

    own = Session(tiny)
    first, again = ask(), ask()
    assert all(one is other for one, other in zip(first, again, strict=True))
    assert sorted(calls) == sorted(
        [
            "calibrate_family",
            "decompose",
            "measure_total_drift",
            *["score_model"] * len(TASKS),
            "measure_sources",
            "measure_weight_changes",
            "preview_samples",
        ]
    )
    assert own.counts(FEW) == dict.fromkeys(TASKS, 8)


def test_numbers_are_those_of_the_public_functions(tiny: Family) -> None:
    own = Session(tiny)
    options = DriftOptions(8, tokens="class", attribution=True, output=True)
    keywords: DriftKeywords = {"samples": 8, "tokens": "class", "attribution": True, "output": True}
    assert own.measure.drift("merged", options).to_json() == measure_drift(tiny, **keywords).to_json()
    assert (
        own.measure.scores("base", EvaluationSamples(6, "test", 7)).to_json()
        == evaluate(tiny, "base", samples=6, seed=7).to_json()
    )
    result = calibrate_family(tiny, CONFIG)
    alone, kept = measure_drift(tiny, result, samples=8), own.measure.drift(CONFIG, DriftOptions(8))
    assert (alone.model, kept.model) == ("calibrated model", "calibrated")
    assert alone.to_json()["tasks"] == kept.to_json()["tasks"]
    assert evaluate(tiny, result).average == own.measure.scores(CONFIG).average


def test_public_functions_of_a_session_ask_the_session(tiny: Family) -> None:
    own = Session(tiny)
    assert measure_drift(own, samples=8) is own.measure.drift("merged", DriftOptions(8))
    assert evaluate(own, "base") is own.measure.scores("base")


def test_keywords_of_measure_drift_are_the_fields_of_its_options() -> None:
    """What mypy checks callers against is what arrives."""
    typed, own = get_type_hints(DriftKeywords), get_type_hints(DriftOptions)
    assert typed == {field.name: own[field.name] for field in fields(DriftOptions)}
    with pytest.raises(TypeError, match="sample"):
        measure_drift("tiny", sample=3)  # type: ignore[arg-type,call-arg]


def test_an_unknown_choice_of_tokens_is_refused_before_anything_is_opened() -> None:
    with pytest.raises(InputError, match="tokens is one of all, class, not 'some'"):
        measure_drift(load_suite("clip-mini"), tokens="some")


def test_scores_of_another_process_are_taken_over(tiny: Family, calls: list[str]) -> None:
    """The session finds them as its own: for the same model and samples alone, by the model's name here."""
    own, view = Session(tiny), EvaluationSamples(6, "test", 7)
    elsewhere = replace(Session(tiny).measure.scores(CONFIG, view), model="/somewhere/calibrated")
    calls.clear()
    assert not own.measure.has_scores(CONFIG, view)
    assert own.measure.adopt_scores(CONFIG, view, elsewhere) == replace(elsewhere, model="calibrated")
    assert own.measure.has_scores(CONFIG, view)
    assert own.measure.scores(CONFIG, view) is own.measure.adopt_scores(CONFIG, view, elsewhere)
    assert calls == []
    assert not any(own.measure.has_scores(*other) for other in (("merged", view), (CONFIG, replace(view, seed=8))))
    for odd in (replace(view, split="validation"), replace(view, split=None)):
        with pytest.raises(InputError, match="scores of the test split"):
            own.measure.adopt_scores(CONFIG, odd, elsewhere)


def test_features_alone_and_taken_apart_tell_the_same(tiny: Family) -> None:
    alone, apart = Session(tiny), Session(tiny)
    whole = apart.measure.drift("merged", DriftOptions(8))
    for task, found in alone.measure.features("merged", FEW).tasks.items():
        for one, other in zip(found.layers, whole.tasks[task].layers, strict=True):
            assert one.layer == other.layer
            torch.testing.assert_close(one.drift, other.drift, rtol=1e-12, atol=0)
    assert apart.measure.features("merged", FEW) is whole


@pytest.mark.parametrize("asked", [{}, {"output": True}, {"attribution": True}])
@pytest.mark.parametrize("held", [{"attribution": True}, {"output": True}, {"attribution": True, "output": True}])
def test_a_walk_that_measured_more_is_not_walked_again(
    asked: dict[str, bool], held: dict[str, bool], tiny: Family, calls: list[str]
) -> None:
    own, options = Session(tiny), DriftOptions(8, **asked)
    expected = Session(tiny).measure.drift("merged", options).to_json()
    calls.clear()
    own.measure.drift("merged", DriftOptions(8, **held))
    assert own.measure.drift("merged", options).to_json() == expected
    assert own.measure.has_features("merged", FEW)
    assert own.measure.features("merged", FEW).macro_cosine == pytest.approx(
        Session(tiny).measure.features("merged", FEW).macro_cosine, rel=1e-12
    )
    needless = "attribution" in asked and "attribution" not in held
    assert calls == ["decompose"] * (1 + needless) + ["measure_total_drift"]


def test_drift_task_by_task_ends_as_the_whole(tiny: Family, calls: list[str]) -> None:
    """An iteration that ends before leaves its tasks to the next; the last one is what `drift` finds."""
    options, own = DriftOptions(8, attribution=True), Session(tiny)
    whole = Session(tiny).measure.drift("merged", options).to_json()
    calls.clear()
    seen: list[tuple[str, int, int]] = []
    first = next(own.measure.drift_by_task("merged", options, lambda *step: seen.append(step)))
    assert tuple(first.tasks) == TASKS[:1]
    assert first.tasks[TASKS[0]].to_json() == whole["tasks"][TASKS[0]]
    assert {total % len(TASKS) for _, _, total in seen} == {0}
    assert max(done for _, done, _ in seen) * len(TASKS) == seen[-1][2]
    *parts, last = own.measure.drift_by_task("merged", options, silent)
    assert [len(one.tasks) for one in parts] == [*range(1, len(TASKS))]
    assert last.to_json() == whole
    assert own.measure.drift("merged", options) is last
    assert [one.tasks.keys() for one in own.measure.drift_by_task("merged", DriftOptions(8))] == [last.tasks.keys()]
    assert calls == ["decompose"] * len(TASKS)


def test_other_samples_tokens_and_layers_are_walked_anew(tiny: Family, calls: list[str]) -> None:
    own = Session(tiny)
    for options in (
        DriftOptions(8, attribution=True, output=True),
        DriftOptions(6),
        DriftOptions(8, seed=7),
        DriftOptions(8, "test"),
        DriftOptions(8, tokens="class"),
        DriftOptions(8, sublayers=True),
    ):
        calls.clear()
        own.measure.drift("merged", options)
        assert calls == ["decompose"]


def test_models_are_told_apart_by_what_they_are(tiny: Family, tmp_path: Path) -> None:
    """A checkpoint by its files, an object by itself; a measured object is not held."""
    own = Session(tiny)
    calibrate_family(tiny, CONFIG).save(tmp_path / "model")
    folder = str(tmp_path / "model")
    ledger = own.measure.drift(folder, DriftOptions(8))
    assert own.measure.drift(folder, DriftOptions(8)) is ledger
    file = tmp_path / "model" / "model.safetensors"
    save_file({name: 1.1 * tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    changed = own.measure.drift(folder, DriftOptions(8))
    assert changed.macro_cosine != ledger.macro_cosine
    tensors = tiny.merged.read(tiny.adapter.tower)
    one, other = InMemory("one", tensors), InMemory("one", tensors)
    assert own.measure.features(one, FEW) is own.measure.features(one, FEW) is not own.measure.features(other, FEW)
    key = IdentityKey(one)
    assert key == IdentityKey(one) != IdentityKey(other)
    gone = ref(one)
    del one
    assert gone() is None
    assert key not in (IdentityKey(other), IdentityKey(key))


@pytest.mark.slow
def test_a_small_budget_holds_and_changes_no_number(tiny: Family) -> None:
    roomy, tight = Session(tiny), {budget: Session(tiny, budget=budget) for budget in (0, 20_000)}
    for config in (CONFIG, replace(CONFIG, rho=1.5), CONFIG):
        for own in (roomy, *tight.values()):
            own.measure.scores(config, FEW)
            own.measure.weight_changes(config)
        for own in tight.values():
            assert own.measure.features(config, FEW).macro_cosine == roomy.measure.features(config, FEW).macro_cosine
            assert own.measure.quick_scores(config, FEW).to_json() == roomy.measure.quick_scores(config, FEW).to_json()
    assert kept_of(roomy) == [True, True]
    assert {budget: kept_of(own) for budget, own in tight.items()} == {0: [False, False], 20_000: [False, True]}


def kept_of(own: Session) -> list[bool]:
    """Whether a session gives its calibration, and then what is small, a second time as it was."""
    return [
        own.fit.calibrate(CONFIG) is own.fit.calibrate(CONFIG),
        own.measure.weight_changes(CONFIG) is own.measure.weight_changes(CONFIG),
    ]


def test_the_least_recently_used_goes_first() -> None:
    results = Results(10, lambda pair: pair[1])  # type: ignore[index]
    for key, size in (("a", 4), ("b", 4)):
        results.get_or_make(key, lambda size=size: size)
    results.get_or_make("a", lambda: 0)
    results.keep("c", 3)
    assert ([*results], results.taken) == (["a", "c"], 7)
    assert results.get_or_make("large", lambda: 11) == 11  # handed over, not kept
    assert ([*results], results.taken) == (["a", "c"], 7)
    results.keep("a", 7)
    assert ([*results], results.taken) == (["c", "a"], 10)


def test_bytes_are_those_of_the_tensors_that_are_held(tiny: Family) -> None:
    own = Session(tiny.resident())
    result = own.fit.calibrate(CONFIG)
    solved = sum(tensor.nbytes for tensor in result.weights.replaced.values())  # type: ignore[attr-defined]
    counted = nbytes(result, (own.family.merged, own.family.adapter, own.family.base, *own.family.experts.values()))
    assert solved < counted < 2 * solved
    small = Session(own.family, budget=3 * solved)
    assert small.fit.calibrate(CONFIG) is small.fit.calibrate(CONFIG)  # the suite's models are not the result's
    features = own.measure.features("merged", FEW)
    held = sum(
        tensor.nbytes
        for task in features.tasks.values()
        for tensor in (
            task.expert_features,
            task.model_features,
            *(number for layer in task.layers for number in (layer.drift, layer.expert_norm)),
        )
    )
    assert held <= nbytes(features) < held + 10_000


@pytest.fixture
def forwards() -> Iterator[Callable[[Callable[[], object]], int]]:
    """How many forward passes of a block something takes."""
    blocks = 0

    def count(module: torch.nn.Module, *_: object) -> None:
        nonlocal blocks
        blocks += type(module).__name__ == "CLIPEncoderLayer"

    def cost(ask: Callable[[], object]) -> int:
        before = blocks
        ask()
        return blocks - before

    with torch.nn.modules.module.register_module_forward_hook(count):
        yield cost


@pytest.mark.slow
def test_expert_passes_have_their_own_room(tiny: Family, forwards: Callable[[Callable[[], object]], int]) -> None:
    own = Session(tiny, budget=0)
    views = [EvaluationSamples(n) for n in range(4, 10)]
    both = [forwards(lambda view=view: own.measure.features("merged", view)) for view in views]  # type: ignore[misc]
    kept = [forwards(lambda view=view: own.measure.features("base", view)) for view in reversed(views)]  # type: ignore[misc]
    assert len({*both}) == 1
    one = kept[0]  # the model alone
    assert 0 < one < both[0]
    assert [cost == one for cost in kept] == [True] * PASSES + [False] * (len(views) - PASSES)


def test_expert_passes_are_found_again_by_what_decides_their_samples(
    tiny: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another seed, number, batch or precision of the samples is another pass; numbers of the solve are none."""
    made: list[str] = []

    def make(family: Family, config: CalibrationConfig, kept: WalkCache, split: str) -> dict[str, ExpertPass]:
        made.append(split)
        return {}

    monkeypatch.setattr("featcal.session.open_suite.expert_passes", make)
    session = Session(tiny)
    for change in ({"samples": 3}, {"augment": 1}, {"seed": 1}, {"batch_size": 7}, {"precision": "fast"}):
        for config in (CONFIG, replace(CONFIG, **change)):
            session.calibration_passes(config)
    session.calibration_passes(CONFIG, "validation")
    assert made == ["calibration"] * 6 + ["validation"]
    for change in ({"lam": 1.0}, {"rho": 1.0}, {"alpha": 1.0}, {"biases": False}, {"tasks": (TASKS[0],)}):
        session.calibration_passes(replace(CONFIG, **change))
    assert len(made) == 7


def test_a_session_for_one_question_keeps_nothing_of_the_experts(
    tiny: Family, forwards: Callable[[Callable[[], object]], int]
) -> None:
    once = Session(tiny, one_shot=True)
    assert once.samples(FEW) is not once.samples(FEW)
    costs = [forwards(lambda model=model: once.measure.features(model, FEW)) for model in ("merged", "base")]  # type: ignore[misc]
    assert costs[0] == costs[1] > 0
    # the samples are drawn anew: the first walk let them go
    whole, again = once.measure.features("merged", FEW), once.measure.features("base", FEW)
    for task in TASKS:
        assert whole.tasks[task].expert_features.equal(again.tasks[task].expert_features)


@pytest.mark.parametrize(
    "method",
    [
        "react",
        "polished:steps=2",
        *(pytest.param(f"{one}:steps=2", marks=pytest.mark.slow) for one in ("surgery", "probsurgery")),
    ],
)
def test_methods_that_read_their_samples_twice_work_in_a_session_for_one_question(tiny: Family, method: str) -> None:
    """`featcal merge` and `featcal evaluate` open such a session; only a calibration walks its samples once."""
    name = f"{method}{',' if ':' in method else ':'}samples=4"
    once, often = (evaluate(Session(tiny, one_shot=one), name, samples=8) for one in (True, False))
    assert {task: one.value for task, one in once.tasks.items()} == {
        task: one.value for task, one in often.tasks.items()
    }


def test_a_limit_of_memory_keeps_nothing_of_the_experts_and_changes_no_number(
    tiny: Family, forwards: Callable[[Callable[[], object]], int]
) -> None:
    bound = Session(tiny, max_memory=2**36)
    for task, found in bound.measure.drift("merged", DriftOptions(6, attribution=True)).tasks.items():
        free = measure_drift(tiny, samples=6, attribution=True).tasks[task]
        assert found.model_features.equal(free.model_features)
    costs = [forwards(lambda model=model: bound.measure.features(model, FEW)) for model in ("merged", "base")]  # type: ignore[misc]
    assert costs[0] == costs[1] > 0
    with pytest.raises(InputError, match="max_memory: an open session keeps its own limit"):
        measure_drift(bound, max_memory=2**36)


def test_failures_are_not_kept(tiny: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def fail(*_: object, **__: object) -> None:
        tried.append(True)
        raise NumericalError("not positive definite")

    own = Session(tiny)
    with monkeypatch.context() as broken:
        broken.setattr(fits, "calibrate_family", fail)
        for _ in range(2):
            with pytest.raises(NumericalError):
                own.measure.drift(CONFIG, DriftOptions(8))
    assert len(tried) == 2
    assert (
        own.measure.drift(CONFIG, DriftOptions(8)).to_json()
        == Session(tiny).measure.drift(CONFIG, DriftOptions(8)).to_json()
    )


@pytest.fixture(scope="module")
def calm(tiny: Family) -> dict[str, Any]:
    """The numbers of a session that nothing disturbs."""
    return numbers(Session(tiny))


@pytest.mark.parametrize("step", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_work_that_is_overtaken_leaves_nothing_half_done(
    tiny: Family, calm: dict[str, Any], calls: list[str], step: int
) -> None:
    class NewerRun(Exception):
        pass

    def overtaken(label: str, done: int, total: int) -> None:
        if done == step:
            raise NewerRun

    disturbed = Session(tiny)
    asked: list[Callable[[Session, Any], object]] = [
        lambda own, report: own.fit.calibrate(CONFIG, report),
        lambda own, report: own.measure.drift("merged", DriftOptions(8), report),
        lambda own, report: own.measure.features("merged", FEW, report),
        lambda own, report: own.measure.scores("merged", FEW, report),
        lambda own, report: own.fit.sources(CONFIG, report),
    ]
    for ask in asked:
        with pytest.raises(NewerRun):
            ask(disturbed, overtaken)
    calls.clear()
    assert numbers(disturbed) == calm
    # Nothing of them was kept.
    assert {"decompose", "measure_total_drift", "score_model", "measure_sources"} <= {*calls}


def numbers(own: Session) -> dict[str, Any]:
    """Of everything that a session computes."""
    ledger: DriftLedger = own.measure.drift(CONFIG, DriftOptions(8, attribution=True))
    return {
        "ledger": ledger.to_json(),
        "features": own.measure.features("merged", FEW).macro_cosine,
        "scores": own.measure.scores(CONFIG, FEW).to_json(),
        "sources": [asdict(one) for one in own.fit.sources(CONFIG)],
    }


def zip_leaves(one: Any, other: Any, name: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Every number of two documents of one shape, with its place, so that a difference is seen at a glance."""
    if not isinstance(one, dict | list):
        yield name, (one, other)
        return
    assert len(one) == len(other), name
    for key in one if isinstance(one, dict) else range(len(one)):
        yield from zip_leaves(one[key], other[key], f"{name}/{key}")


def is_same(name: str, one: Any, other: Any) -> bool:
    """Compare to the last digit; residuals are themselves the rounding of two computations, and of two sessions they
    once differed by 6e-17."""
    return bool(one == pytest.approx(other, abs=1e-14, rel=0) if name.endswith("residual") else one == other)


def test_threads_find_what_others_computed(tiny: Family, calm: dict[str, Any], calls: list[str]) -> None:
    own, start = Session(tiny), threading.Barrier(4)

    def ask(_: int) -> dict[str, Any]:
        start.wait()
        return numbers(own)

    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(ask, range(4))]
    for one in found:
        assert {name: pair for name, pair in zip_leaves(one, calm) if not is_same(name, *pair)} == {}
    once = ["calibrate_family", "decompose", "measure_sources", "measure_total_drift", *["score_model"] * len(TASKS)]
    assert sorted(calls) == once


@pytest.mark.slow
def test_threads_of_a_tight_session_give_the_same_numbers(tiny: Family, calm: dict[str, Any]) -> None:
    own = Session(tiny, budget=5000)
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(lambda _: numbers(own), range(2))] == [calm, calm]
    assert own.fit.calibrate(CONFIG) is not own.fit.calibrate(CONFIG)  # which is larger than its budget


@pytest.mark.slow
def test_the_same_files_are_one_session_while_somebody_holds_it(own_suite_file: Path) -> None:
    first = open_session(own_suite_file)
    assert open_session(load_suite(own_suite_file.parent)) is first
    assert open_session(own_suite_file, resident=True) is not first
    numbers(first)
    del first  # nothing in it holds it, so no collector is needed
    again = open_session(own_suite_file)
    assert not again.measure.has_features("merged", FEW)
    assert not again.measure.has_scores(CONFIG, FEW)
    with ThreadPoolExecutor(4) as pool:
        assert all(one is again for one in pool.map(open_session, [own_suite_file] * 8))


@pytest.mark.parametrize("changed", ["expert", "samples", "suite", "tokenizer"])
def test_changed_content_is_another_session(own_suite_file: Path, changed: str) -> None:
    """Also with the size and the time of the file as they were."""
    before = open_session(own_suite_file)
    cosine = before.measure.features("merged", FEW).macro_cosine
    root = own_suite_file.parent
    if changed == "suite":
        own_suite_file.write_text(own_suite_file.read_text().replace("scale: 0.5", "scale: 0.9"))
    elif changed == "tokenizer":
        file = root / "base" / "tokenizer_config.json"
        file.write_text(file.read_text() + " ")
    else:
        file = root / ("experts/pets/model.safetensors" if changed == "expert" else "samples.safetensors")
        state = file.stat()
        torch.manual_seed(0)
        moved = {
            name: one + 0.3 * torch.randn_like(one) if one.is_floating_point() else one
            for name, one in load_file(file).items()
        }
        save_file(moved, file, {"format": "pt"} if changed == "expert" else None)
        assert file.stat().st_size == state.st_size
        if os.name != "nt":
            os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    after = open_session(own_suite_file)
    assert after is not before
    assert (after.measure.features("merged", FEW).macro_cosine == cosine) == (changed == "tokenizer")


def test_a_stamp_is_of_the_content_of_the_suite(own_suite_file: Path) -> None:
    stamp = suite_stamp(load_suite(own_suite_file))
    own_suite_file.write_text("# a comment\n" + own_suite_file.read_text())
    assert suite_stamp(load_suite(own_suite_file)) == stamp


def test_a_models_folder_costs_little_whatever_lies_below_or_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a change of the model is found among everything else."""
    monkeypatch.setattr(model_files, "MOST", 10)
    for i in range(40):
        (tmp_path / "below" / f"{i}").mkdir(parents=True)
        (tmp_path / "below" / f"{i}" / "config.json").write_text("{}")
        (tmp_path / f"a{i}.jpg").write_text("")
    for name in ("config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        (tmp_path / name).write_text(name)
    before = model_stamp(str(tmp_path), tmp_path)
    assert len(before) == 10
    (tmp_path / "below" / "1" / "config.json").write_text("changed")
    assert model_stamp(str(tmp_path), tmp_path) == before
    (tmp_path / "model-00002-of-00002.safetensors").write_text("changed")
    after = model_stamp(str(tmp_path), tmp_path)
    assert after != before
    (tmp_path / "tokenizer.json").write_text("new")
    assert model_stamp(str(tmp_path), tmp_path) != after


def test_a_suite_that_cannot_be_opened_leaves_no_session(edit_suite: Callable[..., Path]) -> None:
    file = edit_suite(lambda content: content.update(base="gone"))
    for _ in range(2):
        with pytest.raises(InputError, match="gone"):
            open_session(file)


def test_the_experts_features_are_beside_those_of_the_merged_model(tiny: Family) -> None:
    own = Session(tiny)
    assert not own.measure.has_features("expert", FEW)
    assert own.measure.features("expert", FEW) is own.measure.features("merged", FEW)
    assert own.measure.has_features("expert", FEW)


def test_quick_scores_agree_with_an_evaluation(tiny: Family) -> None:
    own = Session(tiny)
    for model in ("merged", "expert"):
        assert (
            own.measure.quick_scores(model, EvaluationSamples(12)).to_json()
            == own.measure.scores(model, EvaluationSamples(None, "validation")).to_json()
        )


@pytest.mark.parametrize("budget", [2**30, 0])
def test_a_merge_is_computed_once_for_all_tasks(tiny: Family, monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    """It is read by every task; where no room is for its tensors, every task merges them anew."""
    merged: list[str] = []
    real = RecipeWeights.read

    def read(self: RecipeWeights, names: Iterable[str]) -> dict[str, torch.Tensor]:
        wanted = list(names)
        merged.extend(wanted)
        return real(self, wanted)

    monkeypatch.setattr(RecipeWeights, "read", read)
    own = Session(tiny, one_shot=True, budget=budget)
    found = own.measure.scores(RECIPE, FEW)
    blocks = [name for block in tiny.adapter.blocks() for name in block.names]
    assert [merged.count(name) for name in blocks] == [1 if budget else len(TASKS)] * len(blocks)
    read_whole = Session(tiny).measure.scores(RECIPE, FEW)
    assert [one.answers() for one in found.tasks.values()] == [one.answers() for one in read_whole.tasks.values()]


def test_a_whole_split_passes_by_in_parts(tiny: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    real = Family.parts

    def counted(self: Family, task: str, *more: Any) -> Iterator[Samples]:
        drawn.append(task)
        return real(self, task, *more)

    monkeypatch.setattr(Family, "parts", counted)
    kept = Session(tiny)
    scores = kept.measure.scores("merged").to_json()
    kept.measure.scores("base")
    assert drawn == [*TASKS]
    drawn.clear()
    monkeypatch.setattr("featcal.family.opening.PART", 5)
    passing = Session(tiny)
    assert passing.measure.scores("merged").to_json() == scores
    passing.measure.scores("base")
    assert drawn == [*TASKS, *TASKS]
    seen = passing.viewable_samples("signs", EvaluationSamples(None, "test"))
    assert (len(seen), seen.inputs, seen.total) == (12, {}, 12)
    assert seen.labels is not None
    assert torch.equal(seen.labels, passing.samples(EvaluationSamples(None, "test"))["signs"].labels)  # type: ignore[arg-type]


def test_a_suite_that_asks_for_fast_is_calibrated_and_measured(own_suite_file: Path) -> None:
    content = yaml.safe_load(own_suite_file.read_text())
    own_suite_file.write_text(yaml.safe_dump({**content, "calibration": {"precision": "fast", "samples": 4}}))
    own = open_session(own_suite_file)
    config = clip_config(samples=4, precision="fast")
    assert own.fit.calibrate(config).record["config"]["precision"] == "fast"
    assert {one.source for one in own.fit.sources(config)} >= {"prefix", "expert"}
    exact = own.fit.calibrate(replace(config, precision="exact"))
    assert exact.weights.read(own.family.adapter.tower).keys() == set(own.family.adapter.tower)


def test_models_are_called_by_what_they_are(tiny: Family) -> None:
    weights: Weights = tiny.merged
    assert [resolve_model(one, tiny).label for one in ("base", CONFIG, weights)] == [
        "base",
        "calibrated",
        weights.label,
    ]
