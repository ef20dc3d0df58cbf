"""LoRA experts: numbers of every variant that is read, parity with peft where it is installed, every refusal."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from glue_files import cached
from lora_files import MODEL, RANK, VOCABULARY, WIDTH, write_adapter
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.func import functional_call

from featcal.family.opening import open_model
from featcal.formats.checkpoint import Checkpoint
from featcal.formats.conversions import UNTIE
from featcal.formats.locate import locate
from featcal.formats.lora import LoraWeights, split_lora
from featcal.formats.peft import AdapterConfig, AdapterPlan
from featcal.formats.weights import Stored, TensorInfo, Weights
from featcal.models.families.clip import ClipVision
from featcal.models.families.registry import adapter_for
from featcal.system.errors import InputError

ATTENTION = "model.layers.0.self_attn."
Q, K = f"{ATTENTION}q_proj", f"{ATTENTION}k_proj"
REMEDY = "merge it into its base with peft's merge_and_unload, save that model and give its folder"


def llama(tied: bool = False) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, attention_bias=True, tie_word_embeddings=tied)).eval()


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": VOCABULARY}
    torch.manual_seed(0)
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval()


def saved(model: Any, folder: Path) -> Path:
    """The model's folder; as built, biases are 0 and weights so small that attention is flat."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter += torch.randn_like(parameter)
            else:
                parameter *= 8
    model.save_pretrained(folder)
    return folder


SHARED = {
    "tied": {"lm_head.weight": "model.embed_tokens.weight"},
    "t5": {f"{stack}.embed_tokens.weight": "shared.weight" for stack in ("encoder", "decoder")},
}
"""Names that repeat a tensor, and the tensor, by base."""


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Folders of tiny base models."""
    root = tmp_path_factory.mktemp("bases")
    models = {"llama": llama(), "tied": llama(tied=True), "half": llama().bfloat16(), "t5": t5()}
    return {name: saved(model, root / name) for name, model in models.items()}


Adapt = Callable[..., LoraWeights]


@pytest.fixture
def adapt(bases: Mapping[str, Path], tmp_path: Path) -> Adapt:
    """Write an adapter by hand and open it over a base."""

    def make(tensors: Mapping[str, Tensor], base: str = "llama", **config: Any) -> LoraWeights:
        write_adapter(tmp_path / "adapter", tensors, **config)
        shared = SHARED.get(base, {})
        canonical = dict.fromkeys(shared).get
        folder = tmp_path / "adapter"
        return LoraWeights(open_base(bases[base]), folder, "expert 'x'", lambda n: canonical(n, n), shared)

    return make


def open_base(folder: Path) -> Checkpoint:
    return Checkpoint(folder, "base", str)


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def factors(module: str, rows: int = WIDTH, columns: int = WIDTH, rank: int = RANK) -> dict[str, Tensor]:
    """A and B of a linear module as peft stores them."""
    return {
        f"{module}.lora_A.weight": noise(rank, columns, seed=1),
        f"{module}.lora_B.weight": noise(rows, rank, seed=2),
    }


def product(tensors: Mapping[str, Tensor], module: str) -> Tensor:
    """B A in float64."""
    return tensors[f"{module}.lora_B.weight"].double() @ tensors[f"{module}.lora_A.weight"].double()


def change(weights: Weights, base: Path, name: str) -> Tensor:
    """What the adapter adds to a tensor, in float64."""
    return weights.read([name])[name].double() - load_file(base / "model.safetensors")[name].double()


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-6, atol=1e-6)


# ---- numbers ----


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({"r": 2, "lora_alpha": 3}, 3 / 2),
        ({"r": 2, "lora_alpha": 3, "use_rslora": True}, 3 / math.sqrt(2)),
        ({"r": 2, "lora_alpha": -0.5}, -0.25),
        ({"r": 8, "lora_alpha": 3, "rank_pattern": {"q_proj": 2}}, 3 / 2),
        ({"r": 8, "lora_alpha": 3, "rank_pattern": {"q_proj": 2}, "use_rslora": True}, 3 / math.sqrt(2)),
        ({"alpha_pattern": {"q_proj": 5}}, 5 / 2),
        ({"alpha_pattern": {"self_attn.q_proj": 5, "q_proj": 7}}, 5 / 2),
        ({"alpha_pattern": {"q_proj": 7, "self_attn.q_proj": 5}}, 7 / 2),
        ({"alpha_pattern": {"^model.layers.0.self_attn.q_proj$": 5}}, 5 / 2),
        ({"alpha_pattern": {r"layers\.[0-3]\..*(q|k)_proj": 5}}, 5 / 2),
        (
            {"alpha_pattern": {"proj": 5, "self_attn": 5, "q_proj.weight": 5, "^q_proj": 5, "1.self_attn.q_proj": 5}},
            3 / 2,
        ),
        ({"alpha_pattern": {"q_proj": 0}}, 0),
        ({"target_modules": ["q_proj", "v_proj"]}, 3 / 2),
        ({"target_modules": r".*\.self_attn\.[qv]_proj"}, 3 / 2),
        ({"target_modules": "all-linear"}, 3 / 2),
        ({"init_lora_weights": "gaussian", "lora_dropout": 0.1, "eva_config": {"rho": 2.0}}, 3 / 2),
    ],
)
def test_scale(adapt: Adapt, bases: Mapping[str, Path], config: dict[str, Any], scale: float) -> None:
    tensors = factors(Q)
    close(change(adapt(tensors, **config), bases["llama"], f"{Q}.weight"), scale * product(tensors, Q))


def test_only_what_the_adapter_changes_differs(adapt: Adapt, bases: Mapping[str, Path]) -> None:
    weights, base = adapt(factors(Q)), load_file(bases["llama"] / "model.safetensors")
    read = weights.read(base)
    assert list(read) == list(base)
    assert [name for name in base if not torch.equal(read[name], base[name])] == [f"{Q}.weight"]
    assert weights.info == open_base(bases["llama"]).info


def test_names_with_the_adapter_name(adapt: Adapt, bases: Mapping[str, Path]) -> None:
    tensors = factors(Q)
    renamed = {name.replace(".weight", ".default.weight"): tensor for name, tensor in tensors.items()}
    close(change(adapt(renamed), bases["llama"], f"{Q}.weight"), 1.5 * product(tensors, Q))


def test_half_precision_is_materialised_in_float32(adapt: Adapt, bases: Mapping[str, Path]) -> None:
    """Not rounded to bfloat16: that would lose up to 2^-9 of every value."""
    tensors = {name: tensor.bfloat16() for name, tensor in factors(Q).items()}
    weights = adapt(tensors, base="half")
    assert weights.info[f"{Q}.weight"].dtype == torch.float32
    assert weights.info[f"{K}.weight"].dtype == torch.bfloat16
    read = weights.read([f"{Q}.weight", f"{K}.weight"])
    assert (read[f"{Q}.weight"].dtype, read[f"{K}.weight"].dtype) == (torch.float32, torch.bfloat16)
    close(change(weights, bases["half"], f"{Q}.weight"), 1.5 * product(tensors, Q))


def test_float64_stays_float64(adapt: Adapt, tmp_path: Path) -> None:
    save_file({f"{Q}.weight": noise(WIDTH, WIDTH, dtype=torch.float64)}, tmp_path / "model.safetensors")
    write_adapter(tmp_path, factors(Q))
    weights = LoraWeights(open_base(tmp_path), tmp_path, "x", str, {})
    expected = 1.5 * product(factors(Q), Q)
    torch.testing.assert_close(change(weights, tmp_path, f"{Q}.weight"), expected, rtol=1e-14, atol=1e-14)


def test_modules_to_save(adapt: Adapt, bases: Mapping[str, Path]) -> None:
    norm, head = noise(WIDTH, seed=3), noise(VOCABULARY, WIDTH, seed=4)
    own = {"model.norm.modules_to_save.default.weight": norm, "lm_head.weight": head.bfloat16()}
    read = adapt({**factors(Q), **own}, modules_to_save=["norm", "lm_head"]).read(
        ["model.norm.weight", "lm_head.weight"]
    )
    assert torch.equal(read["model.norm.weight"], norm)
    assert torch.equal(read["lm_head.weight"], head.bfloat16().float())


def test_trained_biases(adapt: Adapt) -> None:
    own = {f"{Q}.base_layer.bias": noise(WIDTH, seed=3), f"{K}.bias": noise(8, seed=4)}
    read = adapt({**factors(Q), **own}, bias="all").read([f"{Q}.bias", f"{K}.bias"])
    assert torch.equal(read[f"{Q}.bias"], own[f"{Q}.base_layer.bias"])
    assert torch.equal(read[f"{K}.bias"], own[f"{K}.bias"])


def test_lora_bias(adapt: Adapt, bases: Mapping[str, Path]) -> None:
    bias = noise(WIDTH, seed=3)
    weights = adapt({**factors(Q), f"{Q}.lora_B.bias": bias}, lora_bias=True)
    close(change(weights, bases["llama"], f"{Q}.bias"), 1.5 * bias)


def test_lora_bias_on_a_trained_bias(adapt: Adapt) -> None:
    trained, bias = noise(WIDTH, seed=3), noise(WIDTH, seed=4)
    own = {f"{Q}.base_layer.bias": trained, f"{Q}.lora_B.bias": bias}
    read = adapt({**factors(Q), **own}, lora_bias=True, bias="lora_only").read([f"{Q}.bias"])
    close(read[f"{Q}.bias"], trained + 1.5 * bias)


def embedding_factors(module: str, rows: int, width: int) -> dict[str, Tensor]:
    return {
        f"{module}.lora_embedding_A": noise(RANK, rows, seed=1),
        f"{module}.lora_embedding_B": noise(width, RANK, seed=2),
    }


def test_embedding(adapt: Adapt, bases: Mapping[str, Path]) -> None:
    tensors = embedding_factors("model.embed_tokens", VOCABULARY, WIDTH)
    first, second = (tensor.double() for tensor in tensors.values())
    close(change(adapt(tensors), bases["llama"], "model.embed_tokens.weight"), 1.5 * (second @ first).T)


def test_embedding_stored_with_the_adapter(adapt: Adapt) -> None:
    """peft adds the embedding itself when it is a target."""
    tensors, own = embedding_factors("model.embed_tokens", VOCABULARY, WIDTH), noise(VOCABULARY, WIDTH, seed=5)
    first, second = tensors.values()
    weights = adapt({**tensors, "model.embed_tokens.base_layer.weight": own})
    close(weights.read(["model.embed_tokens.weight"])["model.embed_tokens.weight"], own + 1.5 * (second @ first).T)


def test_t5(adapt: Adapt, bases: Mapping[str, Path]) -> None:
    """Linear maps of all three kinds of attention and the position bias, which is an embedding."""
    modules = [f"encoder.block.1.layer.{0}.SelfAttention.q", "decoder.block.0.layer.1.EncDecAttention.v"]
    position = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias"
    low_rank = {name: tensor for module in modules for name, tensor in factors(module).items()}
    weights = adapt({**low_rank, **embedding_factors(position, 32, 2)}, base="t5", target_modules=None)
    assert set(weights.changes) == {f"{module}.weight" for module in [*modules, position]}
    for module in modules:
        close(change(weights, bases["t5"], f"{module}.weight"), 1.5 * product(low_rank, module))
    first, second = embedding_factors(position, 32, 2).values()
    close(change(weights, bases["t5"], f"{position}.weight"), 1.5 * (second @ first).T)


@pytest.mark.parametrize("prefix", ["vision_model.", ""])
def test_clip_by_canonical_names(tiny_suite_file: Path, tmp_path: Path, prefix: str) -> None:
    """transformers 4 and 5 name the modules of a vision tower differently; patterns see the adapter's own names."""
    query, patches = "encoder.layers.1.self_attn.q_proj", "embeddings.patch_embedding"
    first, second = noise(RANK, 3, 4, 4, seed=5), noise(WIDTH, RANK, 1, 1, seed=6)
    convolution = {f"{prefix}{patches}.lora_A.weight": first, f"{prefix}{patches}.lora_B.weight": second}
    write_adapter(
        tmp_path, {**factors(f"{prefix}{query}"), **convolution}, alpha_pattern={f"^{prefix}encoder.*q_proj": 5}
    )
    base = Checkpoint(tiny_suite_file.parent / "base", "base", ClipVision.canonical)
    weights = LoraWeights(base, tmp_path, "x", ClipVision.canonical, {})
    close(change(weights, base.folder, f"vision_model.{query}.weight"), 2.5 * product(factors(query), query))
    expected = torch.einsum("or,rihw->oihw", second[:, :, 0, 0].double(), first.double())
    close(change(weights, base.folder, f"vision_model.{patches}.weight"), 1.5 * expected)


MODULES = [
    f"model.layers.{i}.{rest}"
    for i in (0, 1, 11)
    for rest in ("self_attn.q_proj", "self_attn.v_proj", "mlp.experts.1.up_proj")
] + ["model.embed_tokens", "lm_head", "h.1.q_proj"]
QUERIES = [f"model.layers.{i}.self_attn.q_proj" for i in (0, 1, 11)]
BOTH = ["q_proj", "v_proj"]
SELECTED: list[tuple[dict[str, Any], list[str]]] = [
    ({"target_modules": ["q_proj"]}, [*QUERIES, "h.1.q_proj"]),
    ({"target_modules": ["0.self_attn.q_proj", "roj", "lm_head"]}, [QUERIES[0], "lm_head"]),
    ({"target_modules": ["q_proj"], "layers_to_transform": [0, 11]}, [QUERIES[0], QUERIES[2]]),
    ({"target_modules": ["q_proj"], "layers_to_transform": 1}, [QUERIES[1]]),
    ({"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [11]}, [QUERIES[2], MODULES[8]]),
    ({"target_modules": ["q_proj", "lm_head"], "layers_to_transform": [11]}, [QUERIES[2], "lm_head"]),
    ({"target_modules": ["q_proj"], "layers_to_transform": []}, [*QUERIES, "h.1.q_proj"]),
    ({"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"}, [QUERIES[1]]),
    ({"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["h", "no"]}, ["h.1.q_proj"]),
    ({"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": []}, [QUERIES[1]]),
    ({"target_modules": ["up_proj"], "layers_to_transform": [1], "layers_pattern": "experts"}, MODULES[2:9:3]),
    ({"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers|h"}, ["h.1.q_proj"]),
    ({"target_modules": BOTH, "exclude_modules": ["v_proj", "1.self_attn.q_proj"]}, [*QUERIES[::2], "h.1.q_proj"]),
    ({"target_modules": BOTH, "exclude_modules": r".*layers\.1\..*|.*v_proj|h.*"}, QUERIES[::2]),
    ({"target_modules": BOTH, "exclude_modules": "q_proj"}, [m for m in MODULES if m.endswith(("q_proj", "v_proj"))]),
    ({"target_modules": ["lm_head", "embed_tokens"], "modules_to_save": ["lm_head"]}, ["model.embed_tokens"]),
    ({"target_modules": BOTH, "modules_to_save": ["layers.1", "v_proj", "h"]}, QUERIES[::2]),
    ({"target_modules": r".*\.(0|h\.1)\..*q_proj|h.*", "exclude_modules": []}, [QUERIES[0], "h.1.q_proj"]),
]


@pytest.mark.parametrize(("config", "expected"), SELECTED)
def test_which_modules_are_selected(config: dict[str, Any], expected: list[str]) -> None:
    own = AdapterConfig(peft_type="LORA", r=2, lora_alpha=3, **config)
    assert [module for module in MODULES if own.selects(module, is_linear=True)] == sorted(expected, key=MODULES.index)


@pytest.mark.slow
@pytest.mark.parametrize(("config", "expected"), SELECTED)
def test_selected_as_in_peft(config: dict[str, Any], expected: list[str]) -> None:
    peft = pytest.importorskip("peft")
    from peft.tuners.tuners_utils import _ExcludedModule, check_target_module_exists

    theirs = {module: check_target_module_exists(peft.LoraConfig(**config), module) for module in MODULES}
    assert {m for m, found in theirs.items() if found and not isinstance(found, _ExcludedModule)} == {*expected}


def test_what_the_config_does_not_select_is_left_out(adapt: Adapt, bases: Mapping[str, Path]) -> None:
    other = Q.replace("layers.0", "layers.1")
    tensors = {**factors(Q), **factors(K, rows=8), **factors(other)}
    tensors[f"{other}.base_layer.bias"] = noise(WIDTH)
    weights = adapt(tensors, target_modules=["q_proj", "k_proj"], layers_to_transform=[0], exclude_modules=["k_proj"])
    assert set(weights.changes) == {f"{Q}.weight"}
    assert sorted(weights.ignored_modules) == [K, other]
    close(change(weights, bases["llama"], f"{Q}.weight"), 1.5 * product(tensors, Q))


@pytest.mark.parametrize("targets", ["all-linear", "ALL-linear"])
def test_all_linear_means_neither_head_nor_embedding(adapt: Adapt, targets: str) -> None:
    tensors = {**factors(Q), **factors("lm_head", rows=VOCABULARY), **embedding_factors(TOKENS, VOCABULARY, WIDTH)}
    weights = adapt(tensors, target_modules=targets)
    assert set(weights.changes) == {f"{Q}.weight"}
    assert sorted(weights.ignored_modules) == ["lm_head", TOKENS]


def opened(base: Path, folder: Path, cut: bool = False) -> Weights:
    """The adapter over a base as an expert of a suite is opened: checked against the base's architecture."""
    found = locate(f"{base}+{folder}", folder, "expert 'x'")
    adapter = adapter_for(found.config, found.names, torch.device("cpu"), "x")
    suite: Any = SimpleNamespace(vocabulary="base" if cut else "equal", tasks={}, origin_words="the base")
    return open_model(found, adapter, torch.device("cpu"), suite)


@pytest.mark.parametrize("base", ["llama", "tied"])
@pytest.mark.parametrize("updated", [False, True])
def test_a_resized_vocabulary_goes_in_as_that_of_a_whole_expert(
    bases: Mapping[str, Path], tmp_path: Path, base: str, updated: bool
) -> None:
    """peft saves both embeddings whole then, and where a LoRA lies over one, as its base layer."""
    embedding, head = noise(VOCABULARY + 3, WIDTH, seed=3), noise(VOCABULARY + 3, WIDTH, seed=4)
    update = embedding_factors(TOKENS, VOCABULARY + 3, WIDTH) if updated and base == "llama" else {}
    own = {
        f"{TOKENS}.{'base_layer.' if update else ''}weight": embedding,
        "lm_head.weight": head if base == "llama" else embedding.clone(),
    }
    write_adapter(tmp_path, {**factors(Q), **update, **own})
    with pytest.raises(InputError, match=r"vocabulary of 23 rows, the base has 20 .*'vocabulary: base' in the suite"):
        opened(bases[base], tmp_path)
    weights = opened(bases[base], tmp_path, cut=True)
    expected = embedding[:VOCABULARY]
    if update:
        first, second = update.values()
        expected = expected + 1.5 * (second @ first).T[:VOCABULARY]
    assert weights.info[f"{TOKENS}.weight"].shape == (VOCABULARY, WIDTH)
    close(weights.read([f"{TOKENS}.weight"])[f"{TOKENS}.weight"], expected)
    if base == "llama":
        close(weights.read(["lm_head.weight"])["lm_head.weight"], head[:VOCABULARY])
    close(change(weights, bases[base], f"{Q}.weight"), 1.5 * product(factors(Q), Q))


def test_a_head_stored_beside_the_embedding_that_it_is_tied_to_must_repeat_it(
    bases: Mapping[str, Path], tmp_path: Path
) -> None:
    embedding = noise(VOCABULARY, WIDTH, seed=3)
    write_adapter(tmp_path, {**factors(Q), f"{TOKENS}.weight": embedding, "lm_head.weight": embedding.clone()})
    assert opened(bases["tied"], tmp_path).read([f"{TOKENS}.weight"])[f"{TOKENS}.weight"].equal(embedding)
    write_adapter(tmp_path, {**factors(Q), f"{TOKENS}.weight": embedding, "lm_head.weight": embedding + 1})
    with pytest.raises(
        InputError, match=r"'lm_head.weight' must repeat .*embedding and head were trained separately"
    ) as no:
        opened(bases["tied"], tmp_path)
    assert str(no.value).endswith(UNTIE)


def test_a_model_without_a_head_shares_its_embedding_with_none(adapt: Adapt, bases: Mapping[str, Path]) -> None:
    """A classifier is adapted, whose base has a head tied to its embedding."""
    update = embedding_factors(TOKENS, VOCABULARY, WIDTH)
    weights = adapt(update, "tied", task_type="SEQ_CLS", lora_alpha=3)
    first, second = update.values()
    close(change(weights, bases["tied"], f"{TOKENS}.weight"), 1.5 * (second @ first).T)


def test_copies_that_peft_writes_beside_a_resized_embedding_are_passed_over(
    bases: Mapping[str, Path], tmp_path: Path
) -> None:
    trained = noise(VOCABULARY + 4, WIDTH, seed=3)
    copies = {f"{TOKENS}.modules_to_save.weight": trained.clone(), f"{TOKENS}.original_module.weight": trained + 1}
    write_adapter(tmp_path, {**factors(Q), f"{TOKENS}.weight": trained, **copies}, modules_to_save=["embed_tokens"])
    found = opened(bases["llama"], tmp_path, cut=True).read([f"{TOKENS}.weight"])[f"{TOKENS}.weight"]
    assert found.equal(trained[:VOCABULARY])


def test_what_peft_keeps_tied_changes_embedding_and_head(bases: Mapping[str, Path], tmp_path: Path) -> None:
    """With `ensure_weight_tying`, peft stores the head's update too; it repeats the embedding's."""
    embedding = noise(VOCABULARY, WIDTH, seed=3)
    tied: dict[str, Any] = {"ensure_weight_tying": True}
    whole = {f"{TOKENS}.weight": embedding, "lm_head.weight": embedding.clone()}
    write_adapter(tmp_path, {**factors(Q), **whole}, **tied, modules_to_save=["embed_tokens"])
    assert opened(bases["tied"], tmp_path).read([f"{TOKENS}.weight"])[f"{TOKENS}.weight"].equal(embedding)
    update = embedding_factors(TOKENS, VOCABULARY, WIDTH)
    first, second = update.values()
    head = {"lm_head.lora_A.weight": second.T.contiguous(), "lm_head.lora_B.weight": first.T.contiguous()}
    base_layers = {f"{one}.base_layer.weight": embedding.clone() for one in (TOKENS, "lm_head")}
    write_adapter(tmp_path, {**update, **head, **base_layers}, **tied)
    found = opened(bases["tied"], tmp_path).read([f"{TOKENS}.weight"])[f"{TOKENS}.weight"]
    close(found, embedding + 1.5 * (second @ first).T)


def test_reads_only_what_is_asked_for(adapt: Adapt, monkeypatch: pytest.MonkeyPatch) -> None:
    from featcal.formats.peft import Change

    applied: list[Change] = []
    original = Change.apply
    monkeypatch.setattr(Change, "apply", lambda own, *args: (applied.append(own), original(own, *args))[1])
    weights = adapt({**factors(Q), **factors(K, rows=8)})
    assert weights.read([f"{ATTENTION}v_proj.weight"]).keys() == {f"{ATTENTION}v_proj.weight"}
    assert applied == []
    assert weights.read([f"{K}.weight"]).keys() == {f"{K}.weight"}
    assert applied == [weights.changes[f"{K}.weight"]]


def test_an_adapter_in_a_folder_of_the_hub(
    bases: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    write_adapter(cached("someone/loras/math/r2"), factors(Q))
    located = locate(f"{bases['llama']}+someone/loras/math/r2@main", tmp_path, "expert 'x'")
    close(change(located.open(str, {}), bases["llama"], f"{Q}.weight"), 1.5 * product(factors(Q), Q))


def test_identity(adapt: Adapt, bases: Mapping[str, Path], tmp_path: Path) -> None:
    weights = adapt(factors(Q), base_model_name_or_path="owner/base", revision=None)
    stored: Stored = weights
    assert isinstance(stored, Weights)
    assert weights.label == "expert 'x'"
    assert weights.folder == tmp_path / "adapter"
    assert [file.name for file in weights.files] == [
        "model.safetensors",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert weights.declared_base == "owner/base"
    assert adapt(factors(Q), base_model_name_or_path="owner/base", revision="v2").declared_base == "owner/base@v2"
    assert adapt(factors(Q)).declared_base is None


def test_repeated_tensors_are_the_bases(bases: Mapping[str, Path], tmp_path: Path) -> None:
    tensors = load_file(bases["tied"] / "model.safetensors")
    embedding = "model.embed_tokens.weight"
    save_file({**tensors, "lm_head.weight": tensors[embedding].clone()}, tmp_path / "model.safetensors")
    write_adapter(tmp_path, factors(Q))

    def canonical(name: str) -> str | None:
        return None if name == "lm_head.weight" else name

    weights = LoraWeights(Checkpoint(tmp_path, "base", canonical), tmp_path, "x", canonical, {})
    assert list(weights.leftovers) == ["lm_head.weight"]
    assert weights.repeats("lm_head.weight", embedding)
    assert not weights.repeats("lm_head.weight", f"{Q}.weight")


# ---- references ----


@pytest.mark.parametrize(
    ("ref", "parts"),
    [
        ("base", ("base", None)),
        ("owner/base@v1", ("owner/base@v1", None)),
        ("../base+experts/x", ("../base", "experts/x")),
        ("owner/base@v1+owner/x@refs/pr/2", ("owner/base@v1", "owner/x@refs/pr/2")),
        ("owner/base + owner/x", ("owner/base", "owner/x")),
    ],
)
def test_split(ref: str, parts: tuple[str, str | None]) -> None:
    assert split_lora(ref) == parts


def test_a_folder_with_a_plus_is_not_split(tmp_path: Path) -> None:
    (tmp_path / "a+b").mkdir()
    assert split_lora("a+b", tmp_path) == ("a+b", None)
    assert split_lora("a+c", tmp_path) == ("a", "c")
    (tmp_path / "a").mkdir()
    (tmp_path / "a+b/base").mkdir()
    (tmp_path / "a+b/lora").mkdir()
    assert split_lora("a+b/base+a+b/lora", tmp_path) == ("a+b/base", "a+b/lora")
    assert split_lora("owner/base+a+b/lora", tmp_path) == ("owner/base", "a+b/lora")
    with pytest.raises(InputError, match=r"is not BASE\+ADAPTER"):
        split_lora("owner/base+owner/one+owner/two", tmp_path)


@pytest.mark.parametrize("ref", ["a+b+c", "+b", "a+", "a+ "])
def test_references_that_make_no_sense(ref: str) -> None:
    with pytest.raises(InputError, match=r"is not BASE\+ADAPTER; give one base and one adapter with one '\+'"):
        split_lora(ref)


# ---- refusals ----


UNKNOWN = f"tensors without a meaning in a LoRA that featcal can reproduce exactly; {REMEDY}"
MISSING = "tensors for which the base has none (another model, or a head that it lacks)"
APART = "updates of an embedding that several modules share, but not of all of them: "
HALF = "updates that are not made of lora_A.weight, "
A, B = factors(Q).values()
GATE = "model.layers.0.mlp.down_proj"
MORE_LAYERS = {name: tensor for i in range(5) for name, tensor in factors(f"model.layers.{i}.mlp.foo").items()}
TOKENS, NORM = "model.embed_tokens", "model.norm.weight"


def case(
    what: str, *expected: str, tensors: Mapping[str, Tensor] | None = None, base: str = "llama", **config: Any
) -> Any:
    """An adapter, by default one that is fine, and what its refusal says."""
    return pytest.param(factors(Q) if tensors is None else tensors, base, config, expected, id=what)


def variant(option: str, value: Any) -> Any:
    said = f"adapter_config.json sets {option} = {json.dumps(value)}, which featcal cannot reproduce exactly; {REMEDY}"
    return case("variant", said, **{option: value})


def invalid(expected: str, **config: Any) -> Any:
    return case("invalid config", f"adapter_config.json: {expected}", **config)


def besides(what: str, expected: str, tensors: Mapping[str, Tensor], **config: Any) -> Any:
    """Tensors beside a whole update."""
    return case(what, expected, tensors={**factors(Q), **tensors}, **config)


def misshapen(tensors: Mapping[str, Tensor], expected: str) -> Any:
    return case("shape", "tensors of the wrong shape: ", expected, tensors=tensors)


def shared(base: str, tensors: Mapping[str, Tensor], remedy: str, **config: Any) -> Any:
    said = f"{APART}'{MODEL}{next(iter(tensors))}'"
    return case("shared embedding", said, remedy, tensors=tensors, base=base, **config)


REFUSED = [
    variant("use_dora", True),
    variant("layer_replication", [[0, 2], [1, 2]]),
    variant("megatron_config", {"a": 1}),
    variant("trainable_token_indices", [1]),
    variant("target_parameters", ["experts"]),
    variant("use_qalora", True),
    variant("alora_invocation_tokens", [1]),
    variant("kasa_config", {"a": 1}),
    variant("an_option_of_next_year", 0.5),
    *(
        variant("init_lora_weights", value)
        for value in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga")
    ),
    case("variants", "2 problems:", use_dora=True, init_lora_weights="pissa"),
    *(
        case("method", f"describes an adapter of type {kind}, featcal reads LORA; {REMEDY}", peft_type=kind)
        for kind in ("IA3", "LOHA", "VERA", "ADALORA", None)
    ),
    invalid("r: Input should be greater than 0", r=0),
    invalid("r: Input should be a valid integer", r=None),
    invalid("lora_alpha: Input should be a valid number", lora_alpha="16"),
    invalid("lora_alpha: Input should be a finite number", lora_alpha=float("nan")),
    invalid("rank_pattern.q_proj: Input should be greater than 0", rank_pattern={"q_proj": -1}),
    invalid("alpha_pattern: '(q' is not a regular expression", alpha_pattern={"(q": 1}),
    invalid("exclude_modules: '(q' is not a regular expression", exclude_modules="(q"),
    invalid("layers_pattern: '(q' is not a regular expression", layers_pattern=["h", "(q"], layers_to_transform=[0]),
    invalid("modules_to_save: '(q' is not a regular expression", modules_to_save=["(q"]),
    invalid(
        "layers_to_transform: it needs target_modules as a list", target_modules=".*q_proj", layers_to_transform=[0]
    ),
    invalid("target_modules: '(q' is not a regular expression", target_modules="(q"),
    *(
        besides(what, f"{UNKNOWN}: '{MODEL}{key}' (", {key: noise(*A.shape)}, bias="all")
        for what, key in {
            "bias that peft reads as base_layer.bias": f"{Q}.bias",
            "weight": f"{Q}.weight",
            "DoRA that the config does not admit": f"{Q}.lora_magnitude_vector",
            "base layer without an update": f"{K}.base_layer.bias",
        }.items()
    ),
    besides("factor under two names", f"{UNKNOWN}: '{MODEL}{Q}.lora_A.", {f"{Q}.lora_A.default.weight": A.clone()}),
    *(
        besides("not in the base", f"{MISSING}: '{MODEL}{key}' (", {key: noise(WIDTH)})
        for key in ("model.classifier.weight", "model.rotary.lora_C")
    ),
    case(
        "modules not in the base",
        f"{MISSING}: '{MODEL}model.layers.0.mlp.foo.lora_A.weight', ",
        "and 1 more",
        tensors=MORE_LAYERS,
    ),
    case("half", f"{HALF}lora_B.weight: '{Q} (lora_A.weight)'", tensors={f"{Q}.lora_A.weight": A}),
    case("declared bias that is not there", HALF, lora_bias=True),
    besides("bias that is not declared", HALF, {f"{Q}.lora_B.bias": noise(WIDTH)}, lora_bias=False),
    besides(
        "bias without one in the base",
        f"{MISSING}: '{MODEL}{GATE}.lora_B.bias'",
        {**factors(GATE, columns=24), f"{GATE}.lora_B.bias": noise(WIDTH)},
        lora_bias=True,
    ),
    *(
        case(
            "outside the targets",
            f"adapter_config.json selects none of the modules whose updates are here: '{Q}'",
            **config,
        )
        for config in (
            *({"target_modules": targets} for targets in (["k_proj", "proj"], ".*k_proj", "q_proj")),
            {"exclude_modules": ["q_proj"]},
            {"layers_to_transform": [1]},
        )
    ),
    misshapen(factors(Q, rank=3), f"'{MODEL}{Q}.lora_A.weight [3, 16], expected [2, 16]'"),
    misshapen(factors(Q, rank=3), f"'{MODEL}{Q}.lora_B.weight [16, 3], expected [16, 2]'"),
    misshapen(factors(Q, rows=8), f"'{MODEL}{Q}.lora_B.weight [8, 2], expected [16, 2]'"),
    misshapen(factors(Q, columns=8), f"'{MODEL}{Q}.lora_A.weight [2, 8], expected [2, 16]'"),
    misshapen(factors("model.norm"), f"'{MODEL}model.norm.lora_A.weight [2, 16], expected [2]'"),
    misshapen(embedding_factors("model.norm", 16, 16), f"'{MODEL}model.norm.lora_embedding_B [16, 2], expected [2]'"),
    misshapen(embedding_factors(TOKENS, 21, 16), "lora_embedding_A [2, 21], expected [2, 20]'"),
    misshapen({"lm_head.weight": noise(20, 17)}, f"'{MODEL}lm_head.weight [20, 17], expected [20, 16]'"),
    shared("tied", embedding_factors(TOKENS, VOCABULARY, WIDTH), UNTIE),
    shared("tied", {f"{TOKENS}.weight": noise(VOCABULARY, WIDTH)}, UNTIE, modules_to_save=["embed_tokens"]),
    shared("tied", {"lm_head.weight": noise(VOCABULARY, WIDTH)}, UNTIE, modules_to_save=["lm_head"]),
    shared("tied", factors("lm_head", rows=VOCABULARY), UNTIE),
    shared(
        "t5",
        embedding_factors("shared", VOCABULARY, WIDTH),
        "peft's merge_and_unload would tie them again and give another model; train the adapter without these modules, "
        "or with ensure_weight_tying",
    ),
    besides(
        "whole tensor under two names",
        f"tensors that change '{NORM}' a second time: '{MODEL}{NORM}'",
        {"model.norm.modules_to_save.default.weight": noise(WIDTH), NORM: noise(WIDTH)},
    ),
    besides(
        "integers",
        f"adapter tensors that are not floating-point: '{MODEL}{Q}.lora_A.weight (I32)'",
        {f"{Q}.lora_A.weight": torch.ones(RANK, WIDTH, dtype=torch.int32)},
    ),
    case(
        "all problems at once",
        "3 problems:",
        tensors={**factors(Q, rank=3), **factors("model.foo"), f"{K}.lora_A.weight": noise(RANK, WIDTH)},
    ),
]


@pytest.mark.parametrize(("tensors", "base", "config", "expected"), REFUSED)
def test_refusal(
    adapt: Adapt, tensors: Mapping[str, Tensor], base: str, config: Mapping[str, Any], expected: tuple[str, ...]
) -> None:
    with pytest.raises(InputError) as caught:
        adapt(tensors, base, **config)
    assert all(problem.startswith("expert 'x': ") for problem in caught.value.problems)
    assert all(part in str(caught.value) for part in expected), str(caught.value)


def test_a_pattern_that_takes_too_long_is_a_problem(tmp_path: Path) -> None:
    config, name = (
        AdapterConfig(peft_type="LORA", r=2, lora_alpha=3, target_modules="((.)|(..))*(?(1)[!]|[?])"),
        "a" * 60,
    )
    config._matcher.left = 0.05
    header = {f"{MODEL}{name}.lora_{part}.weight": ((2, 2), "F32") for part in "AB"}
    plan = AdapterPlan(tmp_path, header, config, {f"{name}.weight": TensorInfo((2, 2), torch.float32)}, str, {})
    (problem,) = plan.fill()
    assert problem.startswith("the pattern '((.)|(..))*(?(1)[!]|[?])' takes too long to match 'aaaa")
    assert problem.endswith(f"({tmp_path})")


def test_options_that_are_off_are_no_obstacle(adapt: Adapt) -> None:
    off: dict[str, Any] = {"use_dora": False, "layer_replication": None, "kasa_config": None, "target_parameters": []}
    assert set(adapt(factors(Q), **off).changes) == {f"{Q}.weight"}


def test_names_without_the_prefix(adapt: Adapt, tmp_path: Path) -> None:
    write_adapter(tmp_path, {})
    save_file(factors(Q), tmp_path / "adapter_model.safetensors")
    with pytest.raises(InputError, match="tensors without a meaning") as caught:
        LoraWeights(open_base(adapt(factors(Q)).files[0].parent), tmp_path, "x", str, {})
    assert f"'{Q}.lora_A.weight', '{Q}.lora_B.weight'" in str(caught.value)


def test_a_module_without_a_place(adapt: Adapt, bases: Mapping[str, Path], tmp_path: Path) -> None:
    """None from `canonical` is not taken for permission to leave an update out."""
    write_adapter(tmp_path, factors(Q))
    with pytest.raises(InputError, match="tensors for which the base has none"):
        LoraWeights(open_base(bases["llama"]), tmp_path, "x", lambda name: None, {})


def test_two_names_for_one_tensor(tiny_suite_file: Path, tmp_path: Path) -> None:
    query = "encoder.layers.1.self_attn.q_proj"
    write_adapter(tmp_path, {**factors(query), **factors(f"vision_model.{query}")})
    base = Checkpoint(tiny_suite_file.parent / "base", "base", ClipVision.canonical)
    with pytest.raises(InputError, match=f"tensors that change 'vision_model.{query}.weight' a second time"):
        LoraWeights(base, tmp_path, "x", ClipVision.canonical, {})


def test_quantised_base(tmp_path: Path) -> None:
    save_file({f"{Q}.weight": torch.ones(WIDTH, WIDTH, dtype=torch.int8)}, tmp_path / "model.safetensors")
    write_adapter(tmp_path, factors(Q))
    with pytest.raises(InputError, match="updates of tensors that are not floating-point in the base"):
        LoraWeights(open_base(tmp_path), tmp_path, "x", str, {})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_values_that_are_not_finite(adapt: Adapt, value: float) -> None:
    tensors = factors(Q)
    tensors[f"{Q}.lora_A.weight"][0, 3] = value
    tensors[f"{Q}.lora_B.weight"][:, 0] = max(value, 1.0) if value == 1e30 else 1.0
    weights = adapt(tensors)
    assert len(weights.read([f"{K}.weight"])) == 1
    with pytest.raises(InputError, match=r"16 of 256 values are NaN or infinite") as caught:
        weights.read([f"{Q}.weight"])
    assert f"expert 'x': tensor '{Q}.weight' with '{MODEL}{Q}.lora_A.weight', " in str(caught.value)


def test_missing_files(adapt: Adapt, bases: Mapping[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    adapt(factors(Q))

    def message() -> str:
        with pytest.raises(InputError) as caught:
            LoraWeights(open_base(bases["llama"]), folder, "expert 'x'", str, {})
        return str(caught.value)

    (folder / "adapter_model.safetensors").unlink()
    assert message() == f"expert 'x': {folder} has no adapter_model.safetensors; give a folder that peft saved"
    (folder / "adapter_model.bin").touch()
    assert f"{folder / 'adapter_model.bin'} is damaged or not a plain state dict" in message()
    (folder / "adapter_config.json").write_text("{")
    assert "adapter_config.json is not valid JSON" in message()
    (folder / "adapter_config.json").unlink()
    assert message() == f"expert 'x': {folder} has no readable adapter_config.json, so it is not a peft adapter"
    (folder / "config.json").touch()
    assert message().endswith("it is a whole model, give it without '+'")


# ---- parity with peft ----

LINEAR = ["q_proj", "k_proj", "down_proj"]


LLAMA: list[dict[str, Any]] = [
    {"target_modules": LINEAR},
    {"target_modules": "all-linear", "use_rslora": True},
    {"target_modules": LINEAR, "rank_pattern": {"0.self_attn.q_proj": 3, "q_proj": 1, "k_proj|foo": 5}},
    {"target_modules": LINEAR, "alpha_pattern": {"^model.layers.1.*proj": 7, "attn.q_proj": 9}},
    {"target_modules": ["q_proj"], "bias": "all"},
    {"target_modules": ["q_proj"], "bias": "lora_only", "lora_bias": True},
    {"target_modules": [*LINEAR, "embed_tokens", "lm_head"]},
    {"target_modules": LINEAR, "modules_to_save": ["input_layernorm", "lm_head"]},
    {"target_modules": ["q_proj"], "init_lora_weights": "orthogonal"},
    {"target_modules": ["q_proj"], "init_lora_weights": "mica"},
]
T5: list[dict[str, Any]] = [
    {"target_modules": ["q", "v", "wi", "relative_attention_bias"]},
    {"target_modules": r".*decoder.*(SelfAttention|EncDecAttention)\.[kv]", "bias": "all"},
]
CLIP: list[dict[str, Any]] = [
    {"target_modules": ["q_proj", "fc1"], "alpha_pattern": {r".*encoder.layers.1\..*": 5}},
    {"target_modules": ["patch_embedding", "position_embedding", "visual_projection"], "bias": "all"},
]


def trained(model: Any, folder: Path, config: Mapping[str, Any]) -> Any:
    """An adapter that peft itself has made and saved, all that it trains moved by noise."""
    import peft

    adapted = peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, **config}))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter += torch.randn_like(parameter)
    adapted.save_pretrained(folder)
    return adapted.eval()


@pytest.mark.parametrize(("base", "tensor"), [("tied", TOKENS), ("t5", "shared")])
def test_which_tensors_are_shared_says_the_architecture(
    bases: Mapping[str, Path], tmp_path: Path, base: str, tensor: str
) -> None:
    write_adapter(tmp_path / "a", embedding_factors(tensor, VOCABULARY, WIDTH))
    found = locate(f"{bases[base]}+{tmp_path / 'a'}", tmp_path, "x")
    adapter = adapter_for(found.config, found.names, torch.device("cpu"), "x")
    with pytest.raises(InputError, match="an embedding that several modules share"):
        found.open(adapter.canonical, adapter.aliases)


def _apart(own: Tensor, other: Tensor) -> float:
    """Largest difference, as a part of the largest value."""
    return float((own - other).abs().max() / other.abs().max())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # peft's and transformers' own
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        *[("llama", config) for config in LLAMA],
        ("tied", LLAMA[0]),
        ("half", LLAMA[0]),
        *[("t5", config) for config in T5],
        *[("clip", config) for config in CLIP],
    ],
)
def test_parity_with_peft(
    bases: Mapping[str, Path], tiny_suite_file: Path, tmp_path: Path, kind: str, config: Mapping[str, Any]
) -> None:
    """Tensors and outputs of peft's own `merge_and_unload`, over adapters that peft itself wrote."""
    peft = pytest.importorskip("peft")
    from transformers import CLIPVisionModelWithProjection, LlamaForCausalLM, T5ForConditionalGeneration

    library: Any = {"clip": CLIPVisionModelWithProjection, "t5": T5ForConditionalGeneration}.get(kind, LlamaForCausalLM)
    folder = {**bases, "clip": tiny_suite_file.parent / "base"}[kind]
    canonical = ClipVision.canonical if kind == "clip" else str
    ids = torch.arange(2, 12).reshape(2, 5)
    inputs = {"pixel_values": noise(2, 3, 12, 12)} if kind == "clip" else {"input_ids": ids}
    inputs |= {"decoder_input_ids": ids.flip(1)} if kind == "t5" else {}

    def base() -> Any:
        size = {"projection_dim": 8} if kind == "clip" else {}
        return library.from_pretrained(folder, dtype=torch.float32, **size).eval()

    adapted = trained(base(), tmp_path, config)
    weights = LoraWeights(Checkpoint(folder, "base", canonical), tmp_path, "x", canonical, {})
    merged = peft.PeftModel.from_pretrained(base(), str(tmp_path)).merge_and_unload().eval()
    known = {name: canonical(name) for name in merged.state_dict()}
    own = {name: weights.read([one])[one] for name, one in known.items() if one in weights.info}
    assert own
    assert max(_apart(own[name], merged.state_dict()[name]) for name in own) <= 1e-6
    with torch.no_grad():
        before, after, expected = base()(**inputs)[0], adapted(**inputs)[0], merged(**inputs)[0]
        found = functional_call(merged, {name: one.float() for name, one in own.items()}, (), inputs)[0]
    assert _apart(found, expected) <= 1e-5
    assert (after - before).abs().max() > 0.01 * before.abs().max()  # not in parity for doing nothing
