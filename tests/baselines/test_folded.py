"""Maps of final features in the heads after them: the files say what the modules say, in the libraries that read
them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click import UsageError
from click.testing import CliRunner
from hypothesis import given
from hypothesis.strategies import text
from lanes import rows
from safetensors.torch import load_file
from tiny_clip import TASKS as PICTURES
from tiny_decoders import CLASSIFIERS, tiny_decoder
from tiny_encoders import ROWS, tiny_encoder
from tiny_timm import tiny_timm
from torch import Tensor

from featcal import evaluate, load_suite, open_family, open_session
from featcal.baselines.common.fit import fit
from featcal.baselines.common.fold_heads import fold_head, task_file_name, with_heads
from featcal.baselines.react import AffineMap, React
from featcal.baselines.svc import Svc
from featcal.cli import featcal_command
from featcal.evaluation.evaluate import scoring_heads, task_features
from featcal.evaluation.heads import ClassificationHead, CosineHead, LinearHead, PooledHead
from featcal.evaluation.scoring_heads import head_of
from featcal.export.write import rewrite
from featcal.family.opening import Family, batches_of
from featcal.models.families.timm_vit import TimmVit
from featcal.models.model import Model, own_head
from featcal.suite.views import DriftOptions
from featcal.system.errors import FeatcalError, InputError, NoScores
from featcal.testing.trial import TASKS, Trial, write_trial

REACT = React(samples=5)
KINDS = {
    **{kind: (ROWS[kind], tiny_encoder) for kind in ("bert", "roberta", "vit", "dinov2")},
    **{kind: (CLASSIFIERS[kind], tiny_decoder) for kind in ("gpt2", "gemma2")},
}


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_scores_are_those_behind_the_map() -> None:
    one, features = AffineMap(random(0, 6, 6), random(1, 6)), random(2, 9, 6)
    last = ClassificationHead(random(3, 4, 5), random(4, 4))
    alone, bare = ClassificationHead(random(5, 4, 6), random(6, 4)), ClassificationHead(random(5, 4, 6))
    for head in (alone, bare, PooledHead(random(7, 5, 6), random(8, 5), last), PooledHead(random(7, 5, 6), None, last)):
        found = fold_head(head, one)
        torch.testing.assert_close(found.scores(features), head.scores(one(features)), rtol=1e-12, atol=1e-12)
        assert found.classes == head.classes
    assert fold_head(bare, AffineMap(one.weight, None)).bias is None  # type: ignore[union-attr]
    prompts = CosineHead(torch.nn.functional.normalize(random(9, 3, 6)), 20.0, ("a", "b", "c"))
    norms = one(features).norm(dim=1, keepdim=True)
    torch.testing.assert_close(fold_head(prompts, one).scores(features), prompts.scores(one(features)) * norms)
    with pytest.raises(InputError, match="multiplied into a LinearHead"):
        fold_head(LinearHead(lambda: random(0, 3, 6)), one)


@pytest.fixture(
    scope="module",
    params=rows([*KINDS, "timm"], quick=("bert", "gpt2"), slow=("vit", "roberta", "dinov2", "gemma2", "timm")),
)
def trial(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trial:
    root = tmp_path_factory.mktemp(request.param)
    if request.param == "timm":
        return write_trial(tiny_timm(), TimmVit.facts, root)
    facts, model = KINDS[request.param]
    return write_trial(model(facts), facts, root)


@torch.no_grad()
def test_the_library_reads_the_head_of_every_task(trial: Trial, tmp_path: Path) -> None:
    """The written folder with a task's file over it gives the scores of the module; featcal reads it as that row."""
    found = fit(trial.family, REACT)
    written = found.save(tmp_path / "out")
    assert {f"heads/{task}.safetensors" for task in TASKS} < {*written["written"]}
    assert isinstance(found.weights, Model)
    row, again = evaluate(trial.family, found.weights, split="test"), evaluate(trial.family, str(tmp_path / "out"))
    for task in TASKS:
        module, inputs = found.weights.maps[task], trial.padded_inputs(task, "test")
        assert isinstance(module, AffineMap)
        assert (module.bias is None) == (f"{trial.family.adapter.classifier[0]}.bias" not in trial.family.base.info)
        library = trial.model_class.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
        unchanged = trial.scores(library, inputs)
        loaded = library.load_state_dict(load_file(tmp_path / "out" / "heads" / f"{task}.safetensors"), strict=False)
        assert not loaded.unexpected_keys
        head = head_of(trial.family, trial.family.merged, task)
        expected = head.scores(task_features(trial.family, found.weights, task, [inputs]))
        torch.testing.assert_close(trial.scores(library, inputs), expected, rtol=1e-5, atol=1e-5)
        assert float((unchanged - expected).abs().max()) > 1e-2
        assert again.tasks[task].predictions.equal(row.tasks[task].predictions)  # type: ignore[union-attr,arg-type]
        assert again.tasks[task].value == row.tasks[task].value
        asked = ["merge", str(trial.root / "suite.yaml"), "--method", "react:samples=5", "--task", task]
        CliRunner().invoke(featcal_command, [*asked, "--out", str(tmp_path / task)], catch_exceptions=False)
        alone = trial.model_class.from_pretrained(tmp_path / task, dtype=torch.float32).eval()
        torch.testing.assert_close(trial.scores(alone, inputs), expected, rtol=1e-5, atol=1e-5)
        assert not (tmp_path / task / "heads").exists()


def test_class_prompts_become_a_table(tiny: Family, tiny_suite_file: Path, tmp_path: Path) -> None:
    out, name = tmp_path / "out", "react:samples=12@calibrated:samples=8"
    asked = ["merge", str(tiny_suite_file), "--method", name, "--out", str(out), "--json"]
    done = CliRunner().invoke(featcal_command, asked, catch_exceptions=False)
    assert json.loads(done.stdout)["heads"] == {task: ["cat", "dog", "fish"] for task in PICTURES}
    session = open_session(load_suite(tiny_suite_file), "cpu")
    model, read = (session.fit.weights(session.resolve(one)) for one in (name, str(out)))
    shared = scoring_heads(tiny, "test", dict.fromkeys(PICTURES, model))
    for task in PICTURES:
        batches = batches_of(tiny.samples(task, "test", None, 0), 12, tiny.compute.device)
        own, plain = (task_features(tiny, one, task, batches) for one in (model, read))
        table = load_file(out / "heads" / f"{task}.safetensors")
        scores = plain @ table["classifier.weight"].mT + table["classifier.bias"]
        expected = shared[task].scores(own)
        torch.testing.assert_close(scores / own.norm(dim=1, keepdim=True), expected, rtol=1e-5, atol=1e-5)
        head = own_head(read, task)
        assert head is not None
        torch.testing.assert_close(head.scores(plain), scores, rtol=1e-5, atol=1e-5)
        assert float((scores - shared[task].scores(plain)).abs().max()) > 1e-2
    on = DriftOptions(4, output=True)
    assert session.measure.drift(name, on).tasks["pets"].output is not None
    with pytest.raises(NoScores, match=r"task 'pets': the model's head is a table .* cannot be subtracted"):
        session.measure.drift(str(out), on)
    row, again = evaluate(tiny, model), evaluate(tiny, str(out))
    assert {task: one.value for task, one in again.tasks.items()} == {t: one.value for t, one in row.tasks.items()}


def test_heads_go_where_the_model_goes(tiny: Family, tmp_path: Path) -> None:
    """Another copy of a folder has them too, and one that lost them is refused."""
    fit(tiny, React(samples=12)).save(tmp_path / "out")
    again = rewrite(tmp_path / "out", tmp_path / "again")
    for task in PICTURES:
        name = f"heads/{task}.safetensors"
        assert name in again["written"]
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    damaged, gone = (tmp_path / "again" / "heads" / f"{task}.safetensors" for task in PICTURES)
    damaged.write_bytes(b"none")
    with pytest.raises(InputError, match=r"pets\.safetensors cannot be read"):
        evaluate(tiny, str(tmp_path / "again"))
    damaged.write_bytes(gone.read_bytes())
    gone.unlink()
    with pytest.raises(InputError, match=r"signs\.safetensors cannot be read"):
        evaluate(tiny, str(tmp_path / "again"))
    with pytest.raises(InputError, match=r"'heads/signs\.safetensors' is missing, which its featcal\.json names"):
        rewrite(tmp_path / "again", tmp_path / "third")
    assert not (tmp_path / "third").exists()
    assert with_heads(tiny, tiny.merged, tiny.origin) is tiny.merged


def test_heads_come_from_the_hub_with_the_model(tiny: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = fit(tiny, React(samples=12))
    made.save(tmp_path / "out")
    monkeypatch.setattr("featcal.formats.checkpoint.fetch_model", lambda _: tmp_path / "out")
    row, again = evaluate(tiny, made.weights), evaluate(tiny, "some/react")
    assert {task: one.value for task, one in again.tasks.items()} == {t: one.value for t, one in row.tasks.items()}


def test_a_task_whose_expert_has_no_head_is_named(tmp_path: Path) -> None:
    trial = write_trial(tiny_encoder(ROWS["bert"]), ROWS["bert"], tmp_path / "suite")
    found = fit(trial.family, REACT)
    expert = tmp_path / "suite" / "experts" / "left"
    bare = trial.model_class.from_pretrained(expert).bert
    bare.save_pretrained(expert)
    family = open_family(load_suite(tmp_path / "suite" / "suite.yaml"), "cpu")
    with pytest.raises(InputError, match=r"task 'left'.* has no head for it"):
        type(found)(family, found.options, found.weights, found.record).save(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


def test_what_has_no_folder_for_a_task(tiny: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="a clip model has no head in its files; write all tasks"):
        fit(tiny, React(samples=12)).save(tmp_path / "out", "pets")
    with pytest.raises(InputError, match="one model for all tasks"):
        fit(tiny, Svc()).save(tmp_path / "out", "pets")
    trial = write_trial(tiny_encoder(ROWS["bert"]), ROWS["bert"], tmp_path / "suite")
    with pytest.raises(InputError, match=r"has no task 'lef'\. Did you mean"):
        fit(trial.family, REACT).save(tmp_path / "out", "lef")
    asked = ["merge", str(tmp_path / "suite" / "suite.yaml"), "--out", str(tmp_path / "out"), "--task", "left"]
    assert CliRunner().invoke(featcal_command, [*asked, "--method", "tsv-m"]).exit_code == 2
    assert [one.name for one in tmp_path.iterdir()] == ["suite"]
    monkeypatch.setattr("featcal.session.fits.fit", lambda *_, **__: pytest.fail("fitted in vain"))
    for changed, said in (
        (["--task", "lef", "--method", "react"], "has no task 'lef'"),
        (["--method", "react", "--out", str(tmp_path)], "exists; name another"),
        (["--method", "svc"], "--task is for react"),
    ):
        with pytest.raises((FeatcalError, UsageError), match=said):
            CliRunner().invoke(featcal_command, [*asked, *changed], catch_exceptions=False, standalone_mode=False)


@given(text(), text())
def test_every_task_has_a_file_of_its_own_in_the_folder_of_heads(one: str, other: str) -> None:
    assert (task_file_name(one) == task_file_name(other)) == (one == other)
    assert task_file_name(one) not in (".", "..")
    assert "/" not in task_file_name(one)
