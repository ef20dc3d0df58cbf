"""Options chosen without labels: candidates are fitted on one part of the calibration samples, judged on the other."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from conftest import CLASSES, SIDE, TASKS
from featcal import calibrate, cli, load_suite, measure_drift, open_family, select
from featcal.calibration.config import CalibrationConfig
from featcal.errors import InputError, NumericalError
from featcal.family import Family
from featcal.model_ids import resolved
from featcal.progress import silent
from featcal.selection import candidates, held_out
from featcal.selection.candidates import CHOSEN, options_of, parameters, planned, suggested
from featcal.selection.choose import Selection
from featcal.selection.held_out import HeldOut, Score, apart, calibration_samples, margin
from featcal.selection.study import Candidate, opened
from featcal.session import Session
from featcal.views import View

COUNT = 32
ASKED = CalibrationConfig(samples=COUNT, layernorms=False)


def write_many(root: Path, tiny_suite_file: Path, pictures: Callable[[int, int], Tensor] | None = None) -> Path:
    """The tiny suite with `COUNT` calibration samples per task and no labels; its other splits cannot be opened."""
    shutil.copytree(tiny_suite_file.parent, root)
    generator = torch.Generator().manual_seed(5)

    def noise(task: int, count: int) -> Tensor:
        return torch.randn(count, 3, SIDE, SIDE, generator=generator) + task

    drawn = {task: (pictures or noise)(number, COUNT) for number, task in enumerate(TASKS)}
    save_file(drawn, root / "calibration.safetensors")
    (root / "samples.safetensors").unlink()
    content = yaml.safe_load((root / "suite.yaml").read_text())
    for task in TASKS:
        content["tasks"][task]["calibration"] = {"tensors": "calibration.safetensors", "key": task}
    (root / "suite.yaml").write_text(yaml.safe_dump(content))
    return root / "suite.yaml"


@pytest.fixture(scope="module")
def many_file(tmp_path_factory: pytest.TempPathFactory, tiny_suite_file: Path) -> Path:
    return write_many(tmp_path_factory.mktemp("many") / "suite", tiny_suite_file)


@pytest.fixture(scope="module")
def many(many_file: Path) -> Family:
    return open_family(load_suite(many_file), device="cpu")


def drawn_of(session: Session, config: CalibrationConfig) -> HeldOut:
    return HeldOut(session, config, calibration_samples(session, config))


@pytest.mark.parametrize("recipe", ["paper", "refined"])
def test_a_score_is_the_drift_that_a_suite_without_the_held_out_samples_gives(
    many: Family, many_file: Path, tmp_path: Path, recipe: str
) -> None:
    """Fitted and held-out part as calibration and validation of another suite, measured by the public functions."""
    shutil.copytree(many_file.parent, tmp_path / "two")
    pictures, parts = load_file(many_file.parent / "calibration.safetensors"), {}
    content = yaml.safe_load(many_file.read_text())
    for task in TASKS:
        for split, positions in zip(("calibration", "validation"), apart(COUNT, ASKED.seed, task), strict=True):
            parts[f"{task}.{split}"] = pictures[task][positions]
            content["tasks"][task][split] = {"tensors": "parts.safetensors", "key": f"{task}.{split}"}
    save_file(parts, tmp_path / "two" / "parts.safetensors")
    (tmp_path / "two" / "suite.yaml").write_text(yaml.safe_dump(content))
    other = open_family(load_suite(tmp_path / "two" / "suite.yaml"), device="cpu")
    config = replace(ASKED, recipe=recipe, beta=0.5 if recipe == "refined" else 0.0)
    drift = measure_drift(other, calibrate(other, config), samples=None, split="validation")
    expected = np.mean([one.layers[-1].relative_drift for one in drift.tasks.values()])

    held = drawn_of(Session(many), ASKED)
    score = held.score(held.calibrated(config))
    assert score.value == pytest.approx(expected, rel=1e-6)
    assert {task: len(of) for task, of in score.distances.items()} == dict.fromkeys(TASKS, COUNT // 8)
    assert (score.criterion, held.criterion) == ("drift", "drift")
    shown = drift.tasks["pets"].layers[-1].drift.tolist()
    assert score.distances["pets"] == pytest.approx(shown, rel=1e-5)


def test_enough_samples_are_judged_by_divergence(many: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_out, "ENOUGH_FOR_KL", COUNT // 8)
    held = drawn_of(Session(many), ASKED)
    score = held.score(many.merged)
    assert (held.criterion, held.note) == ("kl", "")
    found = Session(many).features("merged", View(COUNT, "calibration")).tasks
    heads = held_out.pairs_of_heads(many, many.merged, held.samples)
    for task in TASKS:
        rows = apart(COUNT, ASKED.seed, task)[1]
        expert, model = (
            torch.distributions.Categorical(logits=heads[task][0].scores(features[rows].double()))
            for features in (found[task].expert_features, found[task].model_features)
        )
        apart_by = torch.distributions.kl_divergence(expert, model)
        assert score.distances[task] == pytest.approx(apart_by.tolist(), rel=1e-4)
    assert score.value == pytest.approx(np.mean([np.mean(one) for one in score.distances.values()]))


def test_without_heads_divergence_gives_way_and_says_so(many: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_out, "ENOUGH_FOR_KL", COUNT // 8)
    nameless = {task: spec.model_copy(update={"classes": None}) for task, spec in many.suite.tasks.items()}
    held = drawn_of(Session(replace(many, suite=many.suite.model_copy(update={"tasks": nameless}))), ASKED)
    assert held.criterion == "drift"
    assert "no class names" in held.note


def test_one_sample_in_eight_of_every_task_is_held_out() -> None:
    fitted, held = apart(64, 42, "pets")
    assert sorted(fitted + held) == list(range(64))
    assert len(held) == 8
    assert apart(64, 42, "pets") == (fitted, held)
    assert len({tuple(apart(64, seed, task)[1]) for seed in (1, 2) for task in TASKS}) == 4
    assert len(apart(16, 42, "pets")[1]) == 2


def test_where_the_fitted_samples_mislead_the_held_out_ones_decide(
    many: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 samples of noise and a wide choice: what fits them best is the worst on others."""
    monkeypatch.setattr(candidates, "LAMS", (1e-3, 0.1))
    asked = replace(ASKED, samples=16)
    held, configs = drawn_of(Session(many), asked), planned(many, asked)
    configs = [*configs, replace(configs[0], recipe="refined", lam=1e-5, alpha=1.0, beta=1.0)]
    models = [held.calibrated(config) for config in configs]
    others = [held.score(model).value for model in models]
    held.measured = held.fitted
    fitted = [held.score(model).value for model in models]
    assert int(np.argmin(fitted)) == int(np.argmax(others))
    found = select(many, asked, budget=len(configs) - 1, study=tmp_path / "study.sqlite")
    assert found.config == configs[int(np.argmin(others))]
    assert found.candidates[0].score is not None
    assert found.candidates[0].score.value == pytest.approx(min(others))
    assert min(others) < others[int(np.argmin(fitted))] - 0.3


def test_the_choice_is_made_of_all_samples(many: Family, tmp_path: Path) -> None:
    session = Session(many)
    found = select(session, ASKED, budget=4, study=tmp_path / "study.sqlite")
    assert found.calibrated is not None
    again = calibrate(many, found.config)
    for name, tensor in again.weights.read(many.adapter.tower).items():
        assert tensor.equal(found.calibrated.weights.read([name])[name]), name
    assert {task: one["samples"] for task, one in again.record["tasks"].items()} == dict.fromkeys(TASKS, COUNT)
    assert session.calibrated(found.config) is found.calibrated
    assert [options_of(config) for config in planned(many, ASKED)[:4]] == [
        one.options for one in sorted(found.candidates, key=lambda one: _place(one, many))
    ]
    assert found.calibrations == 5
    assert resolved(found.to_json()["model"], many) == found.config


def _place(one: Candidate, family: Family) -> int:
    return [options_of(config) for config in planned(family, ASKED)].index(dict(one.options))


def test_defaults_of_both_recipes_come_first(many: Family) -> None:
    for recipe, other in (("paper", "refined"), ("refined", "paper")):
        asked = replace(ASKED, recipe=recipe, lam=0.3)
        first, second = planned(many, asked)[:2]
        assert first == asked
        assert (second.recipe, second.layernorms, second.samples) == (other, False, COUNT)
    assert second.lam == 0.05
    assert planned(many, ASKED)[1].lam == 0.0032  # of 32 samples
    assert len(planned(many, ASKED)) == 17


def test_only_calibration_samples_are_read_and_no_label(
    many_file: Path, many: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The suite's other splits have no file; with labels, and wrong ones, every number is the same."""
    read: list[str] = []
    real = Family.samples

    def counted(family: Family, task: str, split: str, *more: Any) -> Any:
        read.append(split)
        return real(family, task, split, *more)

    monkeypatch.setattr(Family, "samples", counted)
    bare = select(many, ASKED, budget=4, study=tmp_path / "bare.sqlite")
    assert set(read) == {"calibration"}
    for split in ("validation", "test"):
        with pytest.raises(InputError, match="does not exist"):
            measure_drift(many, "merged", split=split)
    document = bare.to_json()
    assert document["read"] == {"split": "calibration", "seed": 42, "samples": dict.fromkeys(TASKS, COUNT)}
    assert {task: len(one) for task, one in document["held_out"].items()} == dict.fromkeys(TASKS, 4)

    shutil.copytree(many_file.parent, tmp_path / "labelled")
    pictures = load_file(many_file.parent / "calibration.safetensors")
    labels = {f"{task}.y": torch.arange(COUNT) % len(CLASSES) for task in TASKS}
    save_file(pictures | labels, tmp_path / "labelled" / "calibration.safetensors")
    content = yaml.safe_load(many_file.read_text())
    for task in TASKS:
        content["tasks"][task]["calibration"]["labels"] = f"{task}.y"
    (tmp_path / "labelled" / "suite.yaml").write_text(yaml.safe_dump(content))
    labelled = select(
        load_suite(tmp_path / "labelled" / "suite.yaml"), ASKED, budget=4, study=tmp_path / "y.sqlite", device="cpu"
    )
    assert _scores(labelled) == _scores(bare)


def _scores(found: Selection) -> list[tuple[Any, ...]]:
    return [(dict(one.options), one.score and one.score.value, one.failure) for one in found.candidates]


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from featcal import CalibrationConfig, load_suite, open_family, select
from featcal.selection import candidates
candidates.LAMS = (1e-3,)

def until_the_last(label, done, total):
    if done == 7:  # the first candidate that was suggested, while it is computed
        os.kill(os.getpid(), signal.SIGKILL)

family = open_family(load_suite(sys.argv[1]), device="cpu")
select(family, CalibrationConfig(samples=32, layernorms=False), budget=9, study=Path(sys.argv[2]),
       progress=until_the_last)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
@pytest.mark.parametrize("kind", ["sqlite", "journal"])
def test_a_study_whose_process_was_killed_goes_on_to_the_same_end(
    many: Family, many_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    a, b = tmp_path / f"a.{kind}", tmp_path / f"b.{kind}"
    ended = subprocess.run([sys.executable, "-c", KILLED, many_file, a], check=False)
    assert ended.returncode == -9
    monkeypatch.setattr(candidates, "LAMS", (1e-3,))
    made: list[CalibrationConfig] = []
    real = HeldOut.calibrated

    def counted(held: HeldOut, config: CalibrationConfig, *more: Any) -> Any:
        made.append(config)
        return real(held, config, *more)

    monkeypatch.setattr(HeldOut, "calibrated", counted)
    resumed = select(many, ASKED, budget=9, study=a)
    assert len(made) == 2
    whole = select(many, ASKED, budget=9, study=b)
    assert len(made) == 11
    assert _scores(resumed) == _scores(whole)
    assert resumed.config == whole.config
    assert len({json.dumps(one.options) for one in whole.candidates}) == 9
    assert select(many, ASKED, budget=9, study=b).margin == whole.margin
    assert len(made) == 11


def test_a_study_belongs_to_its_samples_and_options(many: Family, tmp_path: Path) -> None:
    file = tmp_path / "study.sqlite"
    first = select(many, ASKED, budget=2, study=file)
    other = select(many, replace(ASKED, seed=7), budget=2, study=file)
    assert first.held_out != other.held_out
    assert _scores(first) != _scores(other)
    assert _scores(select(many, ASKED, budget=2, study=file)) == _scores(first)
    moved = replace(many, merged=many.base)
    assert _scores(select(moved, ASKED, budget=2, study=file)) != _scores(first)


@pytest.mark.parametrize("file", ["s.sqlite", "s.journal"])
def test_processes_share_a_study(many: Family, tmp_path: Path, file: str) -> None:
    """Nobody takes what another computes; what another left is taken again."""
    score = Score("drift", {"t": (0.5,)}, {"t": (1.0,)})
    plan = [options_of(config) for config in planned(many, ASKED)[:2]]

    def tell(label: str, done: int, total: int) -> None:
        told.append(done)
        if len(told) > 3:
            raise TimeoutError

    told: list[int] = []
    with opened(tmp_path / file, "name", 0) as one, opened(tmp_path / file, "name", 0) as two:
        one.plan(plan)
        two.plan(plan)
        with one.taken(2, tell) as first, two.taken(2, tell) as second:
            assert first is not None
            assert second is not None
            assert [first[1], second[1]] == plan
            two.put(second[0], 1.0, score)
            told.clear()
            with pytest.raises(TimeoutError), two.taken(2, tell):  # waits for the first
                pass
        told.clear()
        with two.taken(2, tell) as again:  # the first let it go and told nothing
            assert again is not None
            assert again[1] == plan[0]
            two.put(again[0], 1.0, NumericalError("singular"))
        with one.taken(2, tell) as none:
            assert none is None
        found = [(one.options, one.score, one.failure) for one in one.found()]
    assert found == [(plan[0], None, "singular"), (plan[1], score, "")]


def test_half_a_line_of_a_journal_is_taken_away(many: Family, tmp_path: Path) -> None:
    """A process that dies while it appends leaves one; a file of something else is left alone."""
    file, plan = tmp_path / "s.journal", [options_of(config) for config in planned(many, ASKED)[:2]]
    with opened(file, "name", 0) as study:
        study.plan(plan[:1])
    before = file.read_bytes()
    assert before.endswith(b"\n")
    for torn in (b'{"op', b'{"op_code":4,"worker_id":"x","trial'):
        file.write_bytes(before + torn)
        with opened(file, "name", 0) as study:
            study.plan(plan)
            with study.taken(2, silent) as taken:
                assert taken is not None
                assert taken[1] == plan[0]
        assert file.read_bytes().startswith(before + b'{"op_code":')
    for other in ("no journal", "no journal\n", "{}\n"):
        file.write_text(other)
        with pytest.raises(InputError, match=r"s\.journal: .*; give another file with --study"), opened(file, "n", 0):
            pass
        assert file.read_text() == other


def test_a_candidate_that_fails_is_named_and_never_chosen(
    many: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = HeldOut.calibrated
    broken = {"paper"}

    def failing(held: HeldOut, config: CalibrationConfig, *more: Any) -> Any:
        if config.recipe in broken:
            raise NumericalError("block 0: the system is singular")
        return real(held, config, *more)

    monkeypatch.setattr(HeldOut, "calibrated", failing)
    found = select(many, ASKED, budget=6, study=tmp_path / "a.sqlite")
    assert found.config.recipe == "refined"
    assert found.margin is None  # the defaults have no score
    assert [one.failure for one in found.candidates if one.score is None] == ["block 0: the system is singular"] * 4
    broken.add("refined")
    with pytest.raises(NumericalError, match=r"recipe refined, .*: block 0: the system is singular"):
        select(many, ASKED, budget=6, study=tmp_path / "b.sqlite")


def test_the_margin_is_a_paired_difference() -> None:
    rng = np.random.default_rng(0)
    sizes = {task: tuple(rng.uniform(1, 2, 400)) for task in TASKS}
    before = {task: tuple(rng.uniform(0, 1, 400)) for task in TASKS}
    shift = {task: rng.normal(-0.1, 0.3, 400) for task in TASKS}
    after = {task: tuple(np.array(before[task]) + shift[task]) for task in TASKS}
    one, other = Score("drift", before, sizes), Score("drift", after, sizes)
    found, back = margin(one, other), margin(other, one)
    expected = np.mean([shift[task].sum() / np.sum(sizes[task]) for task in TASKS])
    assert found.difference == pytest.approx(expected)
    assert (found.n, found.within_noise) == (800, False)
    # of a ratio of means: the spread of change - ratio * size, over the mean size
    rest = {t: (shift[t] - shift[t].sum() / np.sum(sizes[t]) * np.array(sizes[t])) / np.mean(sizes[t]) for t in TASKS}
    error = np.sqrt(sum(rest[task].var() / 400 for task in TASKS)) / len(TASKS)
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.05)
    assert (back.low, back.high) == pytest.approx((-found.high, -found.low))
    same = margin(one, one)
    assert (same.difference, same.low, same.high, same.within_noise) == (0, 0, 0, True)


def test_what_is_suggested_can_be_calibrated_with(many: Family) -> None:
    """Options → parameters → options, and the ends of every range."""
    for config in planned(many, replace(ASKED, lam=0.0123, rho=0.61)):
        given = parameters(options_of(config))
        back = suggested(lambda name, _, given=given: given[name], lambda name, *_, given=given, **__: given[name])
        assert list(back) == list(CHOSEN)
        assert back["lam"] == float(f"{config.lam:.2g}")
        near = [abs(back[name] - getattr(config, name)) for name in ("rho", "alpha", "beta")]
        assert max(near) <= 0.125
    for ends in (0, 1):
        for recipe in ("paper", "refined"):
            options = suggested(
                lambda *_, recipe=recipe: recipe, lambda name, low, high, ends=ends, **_: (low, high)[ends]
            )
            assert replace(ASKED, **options).recipe == recipe


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Run a command line in this process, with a cache of its own: (exit status, stdout, stderr)."""
    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path / "cache"))

    def command(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["featcal", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        captured = capsys.readouterr()
        code = stopped.value.code
        return (code if isinstance(code, int) else 0), captured.out, captured.err

    return command


def test_the_command_says_what_to_run_next(run: Run, many_file: Path, many: Family, tmp_path: Path) -> None:
    given = ("select", many_file, "--samples", COUNT, "--no-layernorms", "--budget", 4)
    code, out, err = run(*given, "--out", tmp_path / "best.json", "--json")
    assert code == 0, err
    document = json.loads(out)
    assert json.loads((tmp_path / "best.json").read_text()) == document
    assert {file.name for file in tmp_path.iterdir()} == {"cache", "best.json"}  # nothing half-written
    found = select(many, ASKED, budget=4, study=tmp_path / "own.sqlite")
    assert document["chosen"] == options_of(found.config)
    assert [one["score"] for one in document["candidates"]] == [
        one.score and one.score.value for one in found.candidates
    ]
    assert document["margin"]["difference"] == document["margin"]["b"] - document["margin"]["a"] < 0
    assert document["calibrations"] == 5

    words = [*document["command"].split()[1:-1], tmp_path / "calibrated"]
    code, _, err = run(*words)
    assert code == 0, err
    assert found.calibrated is not None
    for name, tensor in many.model(str(tmp_path / "calibrated")).read(many.adapter.tower).items():
        torch.testing.assert_close(tensor, found.calibrated.weights.read([name])[name], rtol=1e-5, atol=1e-6)

    code, out, _ = run(*given)
    assert code == 0
    assert out.splitlines()[0].split() == ["score", *CHOSEN]
    assert "64 calibration samples of 2 tasks, 8 of them held out; no label" in out
    assert out.splitlines()[-1] == document["command"]
    code, _, err = run(*given, "--out", tmp_path / "best.json")
    assert (code, "best.json exists; name another file" in err) == (1, True)


def test_below_16_samples_the_defaults_stay(run: Run, many_file: Path, many: Family) -> None:
    for recipe, chosen in (("paper", {"lam": 0.05, "beta": 0.0}), ("refined", {"lam": 0.012, "beta": 0.5})):
        code, out, err = run("select", many_file, "--samples", 15, "--recipe", recipe, "--json")
        assert code == 0
        assert "fewer than 16 calibration samples of 'pets' (15), 'signs' (15): too few to tell" in err
        document = json.loads(out)
        assert document["chosen"] == document["defaults"]
        assert {name: document["chosen"][name] for name in chosen} == chosen
        assert document["chosen"]["recipe"] == recipe
        assert (document["candidates"], document["calibrations"], document["margin"]) == ([], 0, None)
    found = select(many, replace(ASKED, samples=16), budget=2)
    assert len(found.candidates) == 2


def test_what_cannot_be_used_is_named(run: Run, many_file: Path, many: Family, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="budget is 1; at least 2"):
        select(many, ASKED, budget=1)
    (tmp_path / "text.txt").write_text("not a database " * 100)
    code, _, err = run("select", many_file, "--samples", COUNT, "--study", tmp_path / "text.txt")
    assert (code, "file is not a database" in err) == (1, True), err
    assert (tmp_path / "text.txt").read_text().startswith("not a database")
