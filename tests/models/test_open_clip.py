"""open_clip: the same tower as its own forward, every linear map seen, the same calibration as transformers' CLIP."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from clip_config import clip_config
from lanes import rows
from open_clip_models import model_cfg, random_state, reference, suite_as_open_clip, write_folder
from safetensors.torch import load_file, save_file
from tiny_clip import in_float64, write_suite
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from featcal import CalibrationConfig, calibrate, load_suite, measure_drift, open_family
from featcal.evaluation.scoring_heads import zero_shot_heads
from featcal.export.clip_counterparts import to_hf, vision_pairs
from featcal.family.opening import Family
from featcal.formats.locate import locate
from featcal.formats.located_model import Located
from featcal.formats.open_clip import is_open_clip_folder, locate_open_clip, open_clip_preprocess
from featcal.formats.quick_gelu import activation_note
from featcal.formats.state_file import state_dict
from featcal.models.adapter import Call
from featcal.models.capture import capture_inputs
from featcal.models.compute import Compute
from featcal.models.families.open_clip import OpenClip, PackedAttentionBlock, SplitAttention
from featcal.models.features import final_features
from featcal.system.errors import InputError, NoScores

CPU = torch.device("cpu")
EXACT = Compute(CPU, torch.float64)
CONFIG = clip_config(samples=12, layernorms=True)
VARIANTS: dict[str, dict[str, Any]] = {
    "quick_gelu": {"quick_gelu": True},
    "gelu": {"quick_gelu": False},
    "attention of open_clip": {"vision": {"block_type": "custom", "scale_attn": True, "scale_fc": True}},
    "layer scale, no first norm": {"vision": {"ls_init_value": 0.5, "no_ln_pre": True}},
}


def found(folder: Path) -> Located:
    return locate_open_clip(f"local-dir:{folder}", Path("/"), "model")


def opened(located: Located) -> Any:
    return OpenClip(located.config, located.names, CPU)


def with_adapter(located: Located) -> tuple[Any, Located]:
    return opened(located), located


@pytest.fixture(
    scope="module",
    params=rows(
        VARIANTS,
        quick=("quick_gelu", "attention of open_clip"),
        slow=("gelu", "layer scale, no first norm"),
    ),
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = model_cfg(**VARIANTS[request.param])
    return write_folder(tmp_path_factory.mktemp("m") / "model", config, random_state(config))


@pytest.fixture(scope="module", params=rows(["quick_gelu", "gelu"], quick=("quick_gelu",), slow=("gelu",)))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Family, Family]:
    """The same suite as transformers' CLIP and as open_clip, in float64."""
    root = tmp_path_factory.mktemp(request.param)
    suite = write_suite(root / "hf")
    for file in (root / "hf").rglob("config.json"):
        config = json.loads(file.read_text())
        for part in (config, config.get("vision_config", {}), config.get("text_config", {})):
            if "hidden_act" in part:
                part["hidden_act"] = request.param
        file.write_text(json.dumps(config))
    families = (open_family(load_suite(file), "cpu") for file in (suite, suite_as_open_clip(suite, root / "oc")))
    hf, oc = (in_float64(family) for family in families)
    return hf, oc


class SeesLinears(TorchFunctionMode):
    """Remembers the weight of every call of F.linear and refuses torch's own fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not nn.functional.multi_head_attention_forward
        if func is nn.functional.linear:
            self.weights.append(args[1])
        return func(*args, **(kwargs or {}))


def test_replay_is_the_models_own_forward(folder: Path) -> None:
    located = found(folder)
    adapter = opened(located)
    weights, inputs = located.open(adapter.canonical, adapter.aliases), adapter.probe()
    ours = final_features(adapter, weights, EXACT.place(weights.read(adapter.head)), [inputs], EXACT)
    model = open_clip.create_model(f"local-dir:{folder}").double().eval()
    with torch.no_grad():
        theirs = model.encode_image(*(one.double() for one in inputs.values()))
    assert float((ours - theirs).abs().max()) <= 1e-12 * float(theirs.abs().max())
    assert adapter.misfit(inputs) is None
    assert set(adapter.shapes()) == {*adapter.tower, *adapter.head}
    assert all(weights.info[name].shape == shape for name, shape in adapter.shapes().items())
    assert all(adapter.is_carried(name) for name in weights.info if name not in adapter.shapes())


@torch.no_grad()
def test_every_linear_map_is_seen_exactly_once(folder: Path) -> None:
    located = found(folder)
    adapter = opened(located)
    weights = located.open(adapter.canonical, adapter.aliases)
    (stage,) = adapter.stages
    call = stage.first_call(weights.read(stage.outer), adapter.probe(), None)
    for block in stage.blocks:
        tensors = block.local(weights.read(block.names))
        with SeesLinears() as oracle, capture_inputs({**block.linears, **block.layernorms}) as inputs:
            output = block.run(tensors, call)
        assert len(block.linears) == len(oracle.weights) == 6
        assert {id(w) for w in oracle.weights} == {id(t) for n, t in tensors.items() if t.ndim == 2}
        assert inputs["attn.q_proj"] is inputs["attn.k_proj"] is inputs["attn.v_proj"]
        call = stage.advance(call, output)


def test_query_key_value_are_views_of_the_packed_tensor(folder: Path) -> None:
    located = found(folder)
    adapter = opened(located)
    weights = located.open(adapter.canonical, adapter.aliases)
    block = adapter.blocks()[1]
    stored = weights.read(block.names)
    local = block.local(stored)
    packed = stored[f"{block.name}.attn.in_proj_weight"]
    storages = {local[f"attn.{part}_proj.weight"].untyped_storage().data_ptr() for part in "qkv"}
    assert storages == {packed.untyped_storage().data_ptr()}
    back = block.canonical(local)
    assert back.keys() == stored.keys()
    assert all(back[name].equal(stored[name]) for name in stored)
    assert not any("bias" in name for name in block.canonical({n: t for n, t in local.items() if "weight" in n}))
    some = block.names_of(["attn.k_proj", "ln_1"])
    assert some == tuple(
        f"{block.name}.{name}" for name in ("ln_1.weight", "ln_1.bias", "attn.in_proj_weight", "attn.in_proj_bias")
    )
    assert block.local(weights.read(some))["attn.k_proj.bias"].equal(local["attn.k_proj.bias"])


@torch.no_grad()
def test_sublayers_together_are_the_block(folder: Path) -> None:
    located = found(folder)
    adapter = opened(located)
    weights = located.open(adapter.canonical, adapter.aliases)
    (stage,) = adapter.stages
    call = stage.first_call(weights.read(stage.outer), adapter.probe(), None)
    for block in stage.blocks:
        tensors = block.local(weights.read(block.names))
        after = call
        for part in stage.sublayers(block, tensors).values():
            after = part(after)
        torch.testing.assert_close(after.hidden_state, block.run(tensors, call), rtol=1e-6, atol=1e-6)


def test_a_packed_tensor_needs_all_its_parts(folder: Path) -> None:
    adapter = opened(found(folder))
    with pytest.raises(ValueError, match="zip"):
        adapter.blocks()[0].canonical({"attn.q_proj.weight": torch.ones(4, 4)})


def test_identical_models_are_a_fixed_point(pair: tuple[Family, Family]) -> None:
    _, family = pair
    same = replace(family, merged=family.base, experts=dict.fromkeys(family.experts, family.base))
    done = calibrate(same, replace(CONFIG, eps=0.0)).weights
    for name, tensor in same.base.read(same.adapter.tower).items():
        torch.testing.assert_close(done.read([name])[name], tensor, rtol=1e-9, atol=1e-10)


def test_drift_is_the_same_as_in_transformers_and_its_identities_hold(pair: tuple[Family, Family]) -> None:
    ledgers = [measure_drift(family, attribution=True, sublayers=True) for family in pair]
    for task in pair[0].suite.tasks:
        hf, oc = (ledger.tasks[task] for ledger in ledgers)
        assert [layer.layer for layer in hf.layers] == [layer.layer for layer in oc.layers]
        for one, other in zip(hf.layers, oc.layers, strict=True):
            torch.testing.assert_close(one.drift, other.drift, rtol=1e-9, atol=1e-10)
        assert oc.identity_residual < 1e-12
        assert oc.attribution is not None
        assert float(oc.attribution.shares.sum()) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize(
    "config",
    [CONFIG, replace(CONFIG, recipe="refined", beta=0.5), replace(CONFIG, recipe="informed", mu=0.1)],
    ids=["paper", "refined", "informed"],
)
def test_the_same_weights_as_open_clip_and_as_hf_give_the_same_calibration(
    pair: tuple[Family, Family], config: CalibrationConfig
) -> None:
    hf, oc = pair
    ours, theirs = calibrate(oc, config).weights, calibrate(hf, config).weights
    translated = to_hf(ours.read(oc.adapter.tower), vision_pairs(3), "calibrated")
    expected = theirs.read(hf.adapter.tower)
    changed = 0
    for name, tensor in translated.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-7, atol=1e-9)
        changed += not expected[name].equal(hf.merged.read([name])[name])
    assert changed == 3 * 16


def test_biases_are_left_alone_when_asked(pair: tuple[Family, Family]) -> None:
    _, family = pair
    done = calibrate(family, replace(CONFIG, biases=False, layernorms=False)).weights
    merged = family.merged.read(family.adapter.tower)
    changed = {name for name, tensor in done.read(family.adapter.tower).items() if not tensor.equal(merged[name])}
    assert len(changed) == 3 * 4
    assert all(name.endswith("weight") for name in changed)


def test_calibration_lowers_the_final_drift(pair: tuple[Family, Family]) -> None:
    _, family = pair
    before, after = measure_drift(family), measure_drift(family, calibrate(family, CONFIG).weights)
    for task in family.suite.tasks:
        assert after.tasks[task].layers[-1].relative_drift < before.tasks[task].layers[-1].relative_drift


def test_another_activation_is_refused(tmp_path: Path, tiny_suite_file: Path) -> None:
    suite = suite_as_open_clip(tiny_suite_file, tmp_path)
    file = tmp_path / "pets" / "open_clip_config.json"
    content = json.loads(file.read_text())
    content["model_cfg"]["quick_gelu"] = False
    file.write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"expert 'pets': quick_gelu is False.*the base has True"):
        open_family(load_suite(suite), "cpu")


# --- attention classes -------------------------------------------------------------------------------------------


class Sliced(nn.Module):
    """An attention that is called with `k_x` and `v_x` and multiplies slices of its packed weight."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.in_proj_weight = nn.Parameter(torch.randn(48, 16) / 4)
        self.in_proj_bias = nn.Parameter(torch.randn(48))
        self.out_proj = nn.Linear(16, 16)
        self.num_heads, self.scale = 4, scale

    def forward(
        self, q_x: Tensor, k_x: Tensor | None = None, v_x: Tensor | None = None, attn_mask: Tensor | None = None
    ) -> Tensor:
        given = (q_x, q_x if k_x is None else k_x, q_x if v_x is None else v_x)
        weights, biases = self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3)
        parts = (nn.functional.linear(*one) for one in zip(given, weights, biases, strict=True))
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        scores = self.scale * q @ k.mT / 2
        mixed = (scores if attn_mask is None else scores + attn_mask).softmax(-1) @ v
        out: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return out


class NewBlock(nn.Module):
    """A block with the calling convention of open_clip's newer versions."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attn, self.ls_1, self.ls_2 = attention, nn.Identity(), nn.Identity()
        self.mlp = nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 16))

    def forward(self, q_x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        normed = self.ln_1(q_x)
        state = q_x + self.ls_1(self.attn(normed, k_x=normed, v_x=normed, attn_mask=attn_mask))
        out: Tensor = state + self.ls_2(self.mlp(self.ln_2(state)))
        return out


class Stack(nn.Module):
    def __init__(self, attention: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList([NewBlock(attention()) for _ in range(2)])


@torch.no_grad()
def test_the_calling_convention_with_k_x_and_v_x() -> None:
    from featcal.models.families.open_clip import split_attention

    torch.manual_seed(0)
    original, stack = Stack(Sliced), Stack(Sliced)
    split_attention(stack)
    block = PackedAttentionBlock("b", stack.resblocks[0])
    own = dict(original.resblocks[0].named_parameters())
    assert sorted(block.names) == sorted(f"b.{name}" for name in own)
    local = block.local({f"b.{name}": tensor for name, tensor in own.items()})
    state, mask = torch.randn(3, 5, 16), torch.full((5, 5), -torch.inf).triu(1)
    for attn_mask in (None, mask):
        with SeesLinears() as oracle, capture_inputs({**block.linears, **block.layernorms}) as inputs:
            ours = block.run(local, Call((state,), {"attn_mask": attn_mask}))
        assert len(oracle.weights) == len(block.linears) == 6
        assert inputs["attn.q_proj"] is inputs["attn.v_proj"]
        theirs = original.resblocks[0](state, attn_mask=attn_mask)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_another_function_under_the_same_names_is_refused() -> None:
    from featcal.models.families.open_clip import split_attention

    with pytest.raises(InputError, match="Sliced is not the attention that featcal knows"):
        split_attention(Stack(lambda: Sliced(scale=2.0)))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"add_bias_kv": True}, "bias_k, bias_v"),
        ({"kdim": 8, "vdim": 8}, "k_proj_weight"),
        ({"add_zero_attn": True}, "options"),
        ({"batch_first": False}, "options"),
    ],
)
def test_other_attention_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        SplitAttention(nn.MultiheadAttention(16, 4, **{"batch_first": True, **options}))


def test_masks_are_additive() -> None:
    split = SplitAttention(nn.MultiheadAttention(16, 4, batch_first=True)).to_empty(device="cpu")
    with pytest.raises(TypeError, match=r"additive.*bool"):
        split(torch.ones(1, 2, 16), attn_mask=torch.ones(2, 2, dtype=torch.bool))


def test_masked_attention_is_torchs_own() -> None:
    torch.manual_seed(0)
    fused = nn.MultiheadAttention(16, 4, batch_first=True)
    block = PackedAttentionBlock("b", nn.ModuleDict({"attn": SplitAttention(fused)}))
    local = block.local({f"b.attn.{name}": tensor for name, tensor in fused.named_parameters()})
    x, mask = torch.randn(2, 5, 16), torch.full((5, 5), -torch.inf).triu(1)
    own = {name.removeprefix("attn."): tensor for name, tensor in local.items()}
    ours, none = functional_call(block.module["attn"], own, (x, x, x), {"attn_mask": mask, "need_weights": False})
    torch.testing.assert_close(ours, fused(x, x, x, attn_mask=mask, need_weights=False)[0])
    assert none is None


@pytest.mark.parametrize(
    ("config", "said"),
    [
        *(
            (model_cfg(vision=vision), (said,))
            for vision, said in (
                ({"timm_model_name": "vit_base"}, "image tower of timm"),
                ({"layers": [1, 1, 1, 1]}, "ResNet image tower"),
                ({"attentional_pool": True}, "attentional pooling"),
                ({"pool_type": "avg"}, "pool_type 'avg'"),
                ({"head_width": 7}, "not a multiple of head_width 7"),
                ({"qk_norm": True}, "ln_k"),
                ({"scale_heads": True}, "head_scale"),
                ({"scaled_cosine_attn": True}, "logit_scale"),
                ({"scale_attn_inner": True}, "ln_inner"),
            )
        ),
        ({**model_cfg(), "quick_gelu": "yes"}, ("quick_gelu is true or false, not 'yes'",)),
        (
            model_cfg(vision={"timm_model_name": "x", "pool_type": "avg"}, hf_model_name="roberta-base"),
            ("3 problems", "text tower of transformers"),
        ),
    ],
)
def test_other_towers_are_refused(config: dict[str, Any], said: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as caught:
        OpenClip({"model_cfg": config}, [], CPU)
    assert all(part in str(caught.value) for part in said)


# --- files -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = model_cfg(True)
    return write_folder(tmp_path_factory.mktemp("plain") / "model", config, random_state(config))


@pytest.mark.parametrize("prefix", ["", "module.", "model.", "module.model."])
@pytest.mark.parametrize("wrap", [True, False])
def test_training_checkpoints_are_read(plain: Path, tmp_path: Path, prefix: str, wrap: bool) -> None:
    tensors = load_file(plain / "open_clip_model.safetensors")
    state: dict[str, Any] = {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
    torch.save({"epoch": 3, "name": "run", "state_dict": state} if wrap else state, tmp_path / "model.pt")
    located = locate_open_clip(f"open_clip:{plain}/open_clip_config.json:model.pt", tmp_path, "expert")
    weights = located.open(opened(located).canonical, {})
    assert set(weights.info) == set(tensors)
    assert all(tensor.equal(tensors[name]) for name, tensor in weights.read(tensors).items())
    assert weights.files == [tmp_path / "model.pt"]


def test_an_image_tower_alone_is_an_expert(plain: Path, tmp_path: Path) -> None:
    tensors = load_file(plain / "open_clip_model.safetensors")
    tower = {name.removeprefix("visual."): t for name, t in tensors.items() if name.startswith("visual.")}
    torch.save(tower, tmp_path / "tower.pt")
    located = locate_open_clip(f"open_clip:{plain}/open_clip_config.json:tower.pt", tmp_path, "expert")
    assert set(located.names) == {name for name in tensors if name.startswith("visual.")}


def test_values_are_read_when_they_are_used(plain: Path, tmp_path: Path) -> None:
    tensors = load_file(plain / "open_clip_model.safetensors")
    tensors["ln_final.weight"][0] = torch.nan
    save_file(tensors, tmp_path / "bad.safetensors")
    located = locate_open_clip(f"open_clip:{plain}/open_clip_config.json:bad.safetensors", tmp_path, "base")
    weights = located.open(lambda name: name, {})
    weights.read(["visual.proj"])
    with pytest.raises(
        InputError, match=r"base: tensor 'ln_final.weight' in .*bad.safetensors: 1 of 16 values are NaN"
    ):
        weights.read(["ln_final.weight"])
    with pytest.raises(InputError, match="tensor 'nothing' is missing from"):
        weights.read(["nothing"])


def cut_in_half(file: Path) -> None:
    torch.save({"a": torch.ones(1)}, file)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize(
    ("name", "write", "said"),
    [
        (
            "module.pt",
            lambda file: torch.save(nn.Linear(2, 2), file),
            r"not a plain state dict.*can run code.*state_dict\(\) as safetensors",
        ),
        ("number.pt", lambda file: torch.save({"b": 3}, file), "'b' is int"),
        ("list.pt", lambda file: torch.save([torch.ones(1)], file), "a list"),
        ("text.pt", lambda file: file.write_text("no model"), "damaged"),
        ("cut.pt", cut_in_half, "damaged"),
        ("cut.safetensors", lambda file: file.write_bytes(b"\x08"), "not a whole safetensors file"),
        ("script.pt", lambda file: torch.jit.script(nn.Linear(2, 2)).save(file), "TorchScript"),
    ],
)
def test_files_that_are_no_state_dict(tmp_path: Path, name: str, write: Callable[[Path], Any], said: str) -> None:
    write(tmp_path / name)
    with pytest.raises(InputError, match=said):
        state_dict(tmp_path / name, "expert")


def test_references_that_lead_nowhere(tmp_path: Path, plain: Path) -> None:
    def error(ref: str) -> str:
        with pytest.raises(InputError) as caught:
            locate_open_clip(ref, tmp_path, "base")
        return str(caught.value)

    assert "is not open_clip:ARCH:FILE" in error("open_clip:ViT-B-32")
    assert "no file" in error("open_clip:ViT-B-32:nowhere.pt")
    (tmp_path / "a.pt").write_bytes(b"")
    assert "Did you mean 'ViT-B-32'" in error("open_clip:VIT-B-32:a.pt")
    assert "no folder" in error("local-dir:./nowhere/at/all")
    assert "cannot be read" in error(f"local-dir:{tmp_path}")
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": {}}))
    assert "no 'model_cfg' with" in error(f"local-dir:{tmp_path}")
    (tmp_path / "open_clip_config.json").write_text((plain / "open_clip_config.json").read_text())
    assert "holds only pickled weights (a.pt); rewrite them with 'featcal export open_clip:" in error(
        f"local-dir:{tmp_path}"
    )
    (tmp_path / "a.pt").unlink()
    assert "no open_clip_model.safetensors" in error(f"local-dir:{tmp_path}")


def test_which_folders_are_open_clips(plain: Path, tmp_path: Path) -> None:
    assert is_open_clip_folder(plain)
    assert not is_open_clip_folder(tmp_path)
    (tmp_path / "open_clip_config.json").write_text("{}")
    assert is_open_clip_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip"}))
    assert not is_open_clip_folder(tmp_path)


def test_preprocessing_is_open_clips_own(tmp_path: Path) -> None:
    from PIL import Image

    config = model_cfg(True)
    how = {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4], "interpolation": "bilinear", "resize_mode": "squash"}
    folder = write_folder(tmp_path / "model", config, random_state(config), **how)
    picture = np.random.default_rng(0).integers(0, 256, (20, 31, 3), dtype=np.uint8)
    ours = open_clip_preprocess(found(folder).config)([picture, picture])
    *_, transform = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    assert ours.shape == (2, 3, 12, 12)
    assert ours[1].equal(transform(Image.fromarray(picture)))


# --- QuickGELU ---------------------------------------------------------------------------------------------------


def arch_error(tmp_path: Path, arch: str, file: str, tensors: dict[str, Tensor]) -> str:
    save_file(tensors, tmp_path / file)
    with pytest.raises(InputError) as caught:
        locate_open_clip(f"open_clip:{arch}:{file}", tmp_path, "expert 'x'")
    return str(caught.value)


def test_weights_that_prove_another_activation_are_refused(tmp_path: Path) -> None:
    some = {"visual.proj": torch.ones(1)}
    openai = some | {"input_resolution": torch.tensor(224)}
    message = arch_error(tmp_path, "ViT-B-32", "a.safetensors", openai)
    assert "OpenAI's own" in message
    assert message.endswith("take architecture 'ViT-B-32-quickgelu'")
    assert "says QuickGELU" in arch_error(tmp_path, "ViT-B-32", "cars_quick-gelu.safetensors", some)
    (tmp_path / "c.json").write_text(json.dumps({"model_cfg": model_cfg(False)}))
    assert '"quick_gelu": true' in arch_error(tmp_path, "c.json", "b.safetensors", openai)


@pytest.mark.parametrize("ref", ["clip", "local-dir:clip"])
def test_a_folder_is_refused_however_it_is_named(ref: str, tmp_path: Path) -> None:
    config = model_cfg(None)
    folder = write_folder(tmp_path / "clip", config, random_state(config))
    weights = folder / "open_clip_model.safetensors"
    save_file(load_file(weights) | {"input_resolution": torch.tensor(224)}, weights)
    with pytest.raises(InputError, match="base: the weights are OpenAI's own"):
        locate(ref, tmp_path, "base")


@pytest.mark.parametrize("states", [None, False])
def test_the_name_of_a_folder_counts_where_its_file_says_nothing(states: bool | None, tmp_path: Path) -> None:
    """The name of the folder itself: what lies above it is named for other reasons."""
    config = model_cfg(states)
    write_folder(tmp_path / "quickgelu-study" / "gelu", config, random_state(config))
    write_folder(tmp_path / "clip-quickgelu", config, random_state(config))
    locate("quickgelu-study/gelu", tmp_path, "base")
    if states is None:
        with pytest.raises(InputError, match="the name 'clip-quickgelu' says QuickGELU"):
            locate("clip-quickgelu", tmp_path, "base")
    else:
        locate("clip-quickgelu", tmp_path, "base")


def test_weight_files_that_open_clip_knows_have_a_known_activation(tmp_path: Path) -> None:
    torch.save({"visual.proj": torch.ones(1)}, tmp_path / "vit_b_32-quickgelu-laion400m_e31-d867053b.pt")
    (tmp_path / "other.pt").write_bytes((tmp_path / "vit_b_32-quickgelu-laion400m_e31-d867053b.pt").read_bytes())
    with pytest.raises(InputError, match="weight file of open_clip, trained with QuickGELU"):
        locate_open_clip("open_clip:ViT-B-32:vit_b_32-quickgelu-laion400m_e31-d867053b.pt", tmp_path, "base")
    known = locate_open_clip(
        "open_clip:ViT-B-32-quickgelu:vit_b_32-quickgelu-laion400m_e31-d867053b.pt", tmp_path, "base"
    )
    assert activation_note(known) is None
    open_question = locate_open_clip("open_clip:ViT-B-32:other.pt", tmp_path, "base")
    assert "if the weights come from openai" in str(activation_note(open_question))


def test_a_folder_that_does_not_say_gets_a_note(tmp_path: Path) -> None:
    notes = {}
    for said in (None, False, True):
        config = model_cfg(said)
        notes[said] = activation_note(found(write_folder(tmp_path / str(said), config, random_state(config))))
    assert "does not say 'quick_gelu'" in str(notes.pop(None))
    assert set(notes.values()) == {None}


# --- inputs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({}, "no pixel_values"),
        ({"pixel_values": torch.ones(1, 3, 9, 9)}, "the model takes [3, 12, 12]"),
    ],
)
def test_inputs_that_do_not_fit(inputs: dict[str, Tensor], said: str) -> None:
    assert said in str(OpenClip({"model_cfg": model_cfg()}, [], CPU).misfit(inputs))


# --- zero-shot heads ---------------------------------------------------------------------------------------------


def test_class_prompts_are_encoded_by_open_clip(tmp_path: Path) -> None:
    config = model_cfg(True, vocab_size=49408, context_length=12)
    folder = write_folder(tmp_path / "model", config, random_state(config))
    names, templates = ("cat", "red bus"), ("a photo of a {}.", "{}")
    head = zero_shot_heads(*with_adapter(found(folder)), {"t": (names, templates)})["t"]
    model = open_clip.create_model(f"local-dir:{folder}").eval()
    with torch.no_grad():
        tokens = open_clip.get_tokenizer(f"local-dir:{folder}")([t.format(n) for n in names for t in templates])
        each = model.encode_text(tokens, normalize=True).reshape(2, 2, -1).mean(1)
    torch.testing.assert_close(head.prompts, nn.functional.normalize(each, dim=-1))
    assert head.scale == pytest.approx(model.logit_scale.exp().item())


def test_bases_without_a_text_tower_or_tokenizer(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(NoScores, match=r"vocabulary of 20 rows is not CLIP's \(49408\)"):
        zero_shot_heads(*with_adapter(found(plain)), {"t": (("a", "b"), ("{}",))})
    tensors = load_file(plain / "open_clip_model.safetensors")
    config = json.loads((plain / "open_clip_config.json").read_text())["model_cfg"]
    tower = write_folder(tmp_path / "tower", config, {n: t for n, t in tensors.items() if n.startswith("visual.")})
    with pytest.raises(NoScores, match="has no text tower, so there is no zero-shot head"):
        zero_shot_heads(*with_adapter(found(tower)), {"t": (("a", "b"), ("{}",))})
    config["text_cfg"]["hf_tokenizer_name"] = "someone/tokenizer"
    named = write_folder(tmp_path / "named", config, tensors)
    with pytest.raises(NoScores, match="no usable tokenizer in someone/tokenizer"):
        zero_shot_heads(*with_adapter(found(named)), {"t": (("a", "b"), ("{}",))})
    (named / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": {"type": "no such kind"}}))
    with pytest.raises(InputError, match=r"no usable tokenizer in .*named, which class prompts need") as damaged:
        zero_shot_heads(*with_adapter(found(named)), {"t": (("a", "b"), ("{}",))})
    assert not isinstance(damaged.value, NoScores)


def test_reference_helper_is_a_suite_reference(plain: Path) -> None:
    located = locate_open_clip(reference(plain), Path("/"), "base")
    assert located.folder == plain
    assert located.config["model_type"] == "open_clip"
