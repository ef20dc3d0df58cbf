"""An architecture of one's own: classes in the manner of transformers, a row of facts, one call."""

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_encoders import ROWS, tiny_encoder
from torch import Tensor, nn
from transformers import (
    ElectraConfig,
    ElectraForSequenceClassification,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutput

from featcal import DecoderFacts, DecoderPart, InputError
from featcal.authoring.from_paths import SuiteParts, write_suite_text
from featcal.models.families import registry
from featcal.models.families.registry import architecture_for, supported_types
from featcal.testing import check_adapter


class OwnConfig(PreTrainedConfig):
    model_type = "own"


class Mix(nn.ModuleDict):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out((q @ k.mT / 4).masked_fill(~mask, -torch.inf).softmax(-1) @ v)


class Block(nn.ModuleDict):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.mix(self.a(x), mask)
        return x + self.feed(self.b(x))


class Stack(nn.ModuleDict):
    def forward(self, input_ids: Tensor, **_: Tensor) -> Tensor:  # the second block looks back two tokens
        seen = torch.ones(2 * input_ids.shape[1:], dtype=torch.bool).tril()
        return self.last(self.blocks[1](self.blocks[0](self.words(input_ids), seen), seen.triu(-2)))


def block() -> Block:
    mix = Mix({"qkv": nn.Linear(16, 48), "out": nn.Linear(16, 16, bias=False)})
    feed = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
    return Block({"a": nn.LayerNorm(16), "b": nn.LayerNorm(16), "mix": mix, "feed": feed})


class OwnForCausalLM(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        blocks = nn.ModuleList([block(), block()])
        self.stack = Stack({"words": nn.Embedding(32, 16), "last": nn.LayerNorm(16), "blocks": blocks})
        self.scores = nn.Linear(16, 32, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, **inputs: Tensor) -> CausalLMOutput:
        return CausalLMOutput(logits=self.scores(self.stack(input_ids, **inputs)))


def test_an_architecture_of_ones_own() -> None:
    names = {"stack": "stack", "blocks": "blocks", "embedding": "words", "norm": "last", "head": "scores"}
    parts = {"parts": (DecoderPart("attention", "mix", "a"), DecoderPart("mlp", "feed", "b")), "shared": ()}
    facts = DecoderFacts(model_type="own", config=OwnConfig, model=OwnForCausalLM, **names, **parts)
    assert check_adapter(OwnForCausalLM(OwnConfig(tie_word_embeddings=False)), facts)["repair"]["drift"] < 1
    assert "own" not in supported_types()


PAGE = Path(__file__).parents[2] / "docs/architectures.md"


def electra_row() -> str:
    """The program of the page that registers ELECTRA, without the registration."""
    (program,) = (
        block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "electra" in block
    )
    return program.removesuffix("register_encoder(facts)\n")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package that brings an architecture, one that cannot be imported and one under another's name."""
    (tmp_path / "electra_row.py").write_text(electra_row())
    places = {"electra": "electra_row:facts", "torn": "electra_none:facts", "other": "electra_row:facts"}
    points = EntryPoints(EntryPoint(name, place, registry.GROUP) for name, place in places.items())
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "entry_points", lambda group: points.select(group=group))
    monkeypatch.setattr(registry, "_FACTS", dict(registry._FACTS))
    registry._entry_points.cache_clear()
    yield
    registry._entry_points.cache_clear()
    sys.modules.pop("electra_row", None)


@pytest.mark.usefixtures("package")
def test_an_installed_package_brings_an_architecture(tmp_path: Path) -> None:
    assert "electra" in supported_types()
    assert "electra_row" not in sys.modules  # names are known without the code
    base, texts = tmp_path / "base", tmp_path / "mood.jsonl"
    base.mkdir()
    (base / "config.json").write_text('{"model_type": "electra", "id2label": {"0": "bad", "1": "good"}}')
    texts.write_text('{"text": "fine", "label": "good"}\n{"text": "poor", "label": "bad"}\n')
    parts = SuiteParts(base=str(base), experts={"mood": str(base)}, data={"mood": str(texts)}, merged=None)
    written = write_suite_text(parts, tmp_path / "suite.yaml").text
    assert "label: label" in written
    assert "classes:" in written
    assert architecture_for({"model_type": "electra"}, "base").family == "electra"
    for name, said in {
        "torn": r"architecture 'torn' of the package electra_none:facts cannot be imported \(ModuleNotFoundError",
        "other": "electra_row:facts is no DecoderFacts or EncoderFacts with model_type 'other'",
    }.items():
        with pytest.raises(InputError, match=said):
            architecture_for({"model_type": name}, "base")


@pytest.mark.slow
def test_the_row_of_the_page_is_true() -> None:
    row: dict[str, Any] = {}
    exec(electra_row(), row)
    config = ElectraConfig(
        vocab_size=64, embedding_size=16, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    assert check_adapter(ElectraForSequenceClassification(config), row["facts"])["repair"]["drift"] < 1


class OwnEncoderConfig(ModernBertConfig):
    model_type = "own-encoder"


class OwnEncoder(ModernBertForSequenceClassification):
    """An encoder whose classes are not in transformers, with a head of several modules."""

    config_class = OwnEncoderConfig
    base_model_prefix = ""  # `base_model` is the whole model


@pytest.mark.slow
def test_an_encoder_of_ones_own_with_a_head_of_modules() -> None:
    config = OwnEncoderConfig(**tiny_encoder(ROWS["modernbert"]).config.to_dict() | {"model_type": "own-encoder"})
    facts = replace(ROWS["modernbert"], model_type="own-encoder", config=OwnEncoderConfig, model=OwnEncoder)
    assert check_adapter(OwnEncoder(config), facts)["repair"]["outputs"] < 1e-5
    linear = replace(facts, head=(), classifier=("head.dense", "classifier"))
    with pytest.raises(AssertionError, match="the facts do not describe the head, 1 of 1 by more"):
        check_adapter(OwnEncoder(config), linear)
    assert "own-encoder" not in supported_types()
