"""An architecture of one's own: classes in the manner of transformers, a row of facts, one call."""

from dataclasses import replace

import pytest
import torch
from tiny_encoders import ROWS, tiny_encoder
from torch import Tensor, nn
from transformers import ModernBertConfig, ModernBertForSequenceClassification, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from featcal import DecoderFacts, DecoderPart
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
