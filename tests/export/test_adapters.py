"""Adapters in peft's layout: loaded by peft over a merge or a base they give the calibrated model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Run, document
from huggingface_hub import ModelCard
from lanes import rows
from tiny_clip import write_suite
from tiny_decoders import fresh
from tiny_encoders import ROWS, tiny_encoder
from tiny_text import write_text_suite
from tiny_timm import tiny_timm

from featcal.calibration.low_rank import Limits
from featcal.export.adapter_files import require_adaptable
from featcal.export.to_model import to_library_model
from featcal.family.opening import open_family
from featcal.formats.lora import LoraWeights
from featcal.models.families.timm_vit import TimmVit
from featcal.session.session import Session
from featcal.suite.schema import load_suite
from featcal.system.errors import InputError
from featcal.testing.trial import write_trial

CALIBRATED = "calibrated:samples=5"
FULL = Limits(rank=1000)
pytestmark = [  # peft's own
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied:UserWarning"),
]
KINDS = ("clip", "t5", "llama", "gpt2", "qwen2", "bert", "vit", "dinov2")


def session_of(kind: str, root: Path) -> Session:
    if kind == "clip":
        file = write_suite(root)
    elif kind in ("t5", "llama", "llama-tied"):
        file = write_text_suite(root, kind)
    elif kind in ROWS:
        file = write_trial(tiny_encoder(ROWS[kind]), ROWS[kind], root).root / "suite.yaml"
    else:
        file = fresh(kind, root).root / "suite.yaml"
    return Session(open_family(load_suite(file), "cpu"))


@pytest.fixture(scope="module", params=rows(KINDS, quick=("clip", "t5", "llama"), slow=("gpt2", "qwen2", "vit")))
def session(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Session:
    return session_of(request.param, tmp_path_factory.mktemp(request.param))


@torch.no_grad()
def outputs(session: Session, model: Any) -> torch.Tensor:
    inputs = dict(session.family.adapter.probe())
    found = getattr(model, "vision_model", model)(**inputs)
    return found.logits if hasattr(found, "logits") else found.pooler_output


def with_adapter(session: Session, over: str, folder: Path) -> Any:
    """The start as its library has it, with an adapter that peft loads."""
    peft = pytest.importorskip("peft")
    family = session.family
    start = family.merged if over == "merged" else family.base
    container = family.container if over == "merged" else family.origin
    return peft.PeftModel.from_pretrained(to_library_model(family, container, start), folder)


def test_peft_gives_the_calibrated_model(session: Session, tmp_path: Path) -> None:
    """At full rank, on top and merged by peft; switched off it is the merge again."""
    family, result = session.family, session.fit.calibrate(CALIBRATED)
    made = session.fit.repair(CALIBRATED, "merged", FULL)
    document = made.save(tmp_path / "adapter")
    calibrated = outputs(session, to_library_model(family, family.container, result.weights))
    merged = outputs(session, to_library_model(family, family.container, family.merged))
    model = with_adapter(session, "merged", tmp_path / "adapter")
    scale = float(calibrated.abs().max())
    assert float((outputs(session, model.base_model.model) - calibrated).abs().max()) <= 1e-5 * scale
    assert float((merged - calibrated).abs().max()) > 1e-2 * scale
    if json.loads((tmp_path / "adapter/adapter_config.json").read_text())["bias"] == "none":
        with model.disable_adapter():
            assert float((outputs(session, model.base_model.model) - merged).abs().max()) <= 1e-6 * scale
    assert float((outputs(session, model.merge_and_unload()) - calibrated).abs().max()) <= 1e-5 * scale
    assert document["adapter"]["left_out"] == pytest.approx(0, abs=1e-12)


@pytest.mark.slow
def test_featcal_reads_it_as_base_and_adapter(session: Session, tmp_path: Path) -> None:
    """Cut down, it is the model that `weights` says, to the rounding of one sum."""
    made = session.fit.repair(CALIBRATED, "merged", Limits(rank=2))
    made.save(tmp_path / "adapter")
    adapter = session.family.adapter
    back = LoraWeights(
        session.family.merged, tmp_path / "adapter", "adapter", adapter.canonical, adapter.aliases  # type: ignore[arg-type]
    )  # fmt: skip
    found, wanted = (one.read(adapter.tower) for one in (back, made.weights))
    for name in adapter.tower:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-6, atol=1e-6)
    assert {one.rank for one in made.cuts} == {2}
    lost = {layer["layer"]: layer["left_out"] for layer in made.layers()}
    assert all(0 < share < 1 for share in lost.values())
    assert [*lost] == list(adapter.block_layers())


@pytest.mark.parametrize("kind", ["clip", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_whole_merge_is_one_adapter_over_the_base(kind: str, tmp_path: Path) -> None:
    """Embeddings, norms and heads are saved whole, in modules that the card and the record name."""
    session = session_of(kind, tmp_path / "suite")
    family, result = session.family, session.fit.calibrate(CALIBRATED)
    document = session.fit.repair(CALIBRATED, "base", FULL).save(tmp_path / "adapter", "someone/base")
    model = with_adapter(session, "base", tmp_path / "adapter")
    calibrated = outputs(session, to_library_model(family, family.container, result.weights))
    apart = outputs(session, model.base_model.model) - calibrated
    assert float(apart.abs().max()) <= 1e-5 * float(calibrated.abs().max())
    whole = document["adapter"]["whole"]
    assert {"clip": "vision_model.embeddings", "llama": "model.embed_tokens"}[kind] in whole
    assert {"clip": "vision_model.encoder.layers.0.layer_norm1", "llama": "model.norm"}[kind] in whole
    card = ModelCard.load(tmp_path / "adapter/README.md")
    assert (card.data.library_name, card.data.base_model) == ("peft", "someone/base")
    assert any("saved whole" in note for note in document["notes"])


@pytest.mark.slow
def test_energy_decides_the_ranks_and_factors_have_the_dtype_of_their_weights(tmp_path: Path) -> None:
    file = write_text_suite(tmp_path / "suite", "llama", dtype=torch.bfloat16)
    session = Session(open_family(load_suite(file), "cpu"))
    made = session.fit.repair(CALIBRATED, "merged", Limits(energy=0.9))
    assert all(one.left_out <= 0.1 * one.total for one in made.cuts)
    assert len({one.rank for one in made.cuts}) > 1
    assert {one.dtype for pair in made.products.values() for one in pair} == {torch.bfloat16}
    made.save(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert config["r"] == max(one.rank for one in made.cuts)
    assert config["rank_pattern"] == config["alpha_pattern"] != {}
    assert config["task_type"] == "CAUSAL_LM"


def test_what_no_adapter_can_hold_is_refused(tmp_path: Path) -> None:
    tied = session_of("llama-tied", tmp_path / "tied").fit.repair(CALIBRATED, "base", Limits(1))
    with pytest.raises(InputError, match="shared by several modules"):
        tied.save(tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()
    with pytest.raises(InputError, match="is a mixture"):
        require_adaptable(session_of("mixtral", tmp_path / "mixture").family.adapter)
    timm = write_trial(tiny_timm(), TimmVit.facts, tmp_path / "timm").family
    with pytest.raises(InputError, match="this is one of timm"):
        require_adaptable(timm.adapter)
    clip = session_of("clip", tmp_path / "clip")
    with pytest.raises(InputError, match="is not a calibration"):
        clip.fit.repair("merged", "merged", FULL)


@pytest.mark.slow
def test_export_writes_the_repair_of_a_calibrated_folder(
    run: Run, tiny_suite_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    document(run("calibrate", tiny_suite_file, "--samples", 5, "--lam", 0.3, "--out", "calibrated", "--json"))
    said = ("export", "calibrated", "--as", "adapter", "--suite", tiny_suite_file)
    made = document(run(*said, "--rank", 2, "--of", "base", "--out", "small", "--json"))
    assert (made["adapter"]["of"], made["adapter"]["rank"], made["adapter"]["energy"]) == ("base", 2, None)
    assert [row["rank"] for row in made["layers"]] == [[2, 2]] * 3
    # The folder, and not the model that is called as it is.
    assert (made["config"]["lam"], made["config"]["samples"]) == (0.3, 5)
    code, out, err = run(*said, "--energy", 0.95, "--out", "adapter")
    assert (code, out.count("block")) == (0, 3)
    assert "of the change is left out" in out
    sent = document(run("push", "adapter", "me/repair", "--license", "mit", "--json"))
    assert {"adapter_model.safetensors", "adapter_config.json"} <= {one["name"] for one in sent["files"]}
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md", "featcal.json"} == {
        file.name for file in Path("adapter").iterdir()
    }
    for arguments, why in (
        ((*said[:-2], "--rank", 2), "name its file suite.yaml with --suite"),
        ((*said, "--format", "hf"), "has the layout of peft"),
        (("export", "calibrated", "--rank", 2), "--rank: only with --as adapter"),
        (said, "give the size of the adapter"),
    ):
        code, _, err = run(*arguments, "--out", "nothing")
        assert code != 0
        assert why in err
