"""Every decoder-only architecture of the table, on tiny models of the library's own making: padded batches, windows
shorter than the texts, and what must hold for any of them (`featcal.testing.checks`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from checked import checks
from lanes import rows
from safetensors.torch import load_file, save_file
from tiny_decoders import ROWS, fresh, tiny_decoder

from featcal import (
    InputError,
    calibrate,
    load_suite,
    measure_drift,
    open_family,
    register_decoder,
)
from featcal.calibration.block_statistics import likely_groups
from featcal.models.adapter import walking
from featcal.models.capture import capture_inputs
from featcal.models.families import registry
from featcal.models.families.decoder_facts import PRE_NORM, ExpertFacts
from featcal.models.generation import read_generation_config
from featcal.models.linear_maps import widths
from featcal.preflight.check import check_suite
from featcal.testing.checks import CHECKS
from featcal.testing.trial import TASKS, Trial, write_trial

QUICK = ("gemma2", "gpt2", "llama", "mixtral", "olmo2", "qwen3")
"""One of every structure: norms on both sides and soft caps, maps stored turned, plain, a mixture, norms after alone,
norms of heads."""
SLOW = ("exaone4", "gemma3_text", "glm4", "phi3", "qwen3_moe", "smollm3")
"""Calibrated tensors of theirs are checked by the slow lane: windows, norms after parts, maps in one, other mixtures,
blocks without positions."""
REST = [kind for kind in ROWS if kind not in QUICK]


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trial]:
    """By kind, each written once."""
    return cache(lambda kind: fresh(kind, tmp_path_factory.mktemp(kind)))


@pytest.fixture(params=rows(sorted(ROWS), quick=QUICK, slow=REST))
def trial(request: pytest.FixtureRequest, trials: Callable[[str], Trial]) -> Trial:
    return trials(request.param)


@pytest.fixture(autouse=True)
def without_canary(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has tests of its own, and takes longer than all else here."""
    monkeypatch.setattr("featcal.calibration.calibrate._generation", lambda *_: {})


@pytest.mark.parametrize(("kind", "name"), checks(sorted(ROWS), QUICK, SLOW))
def test_what_must_hold(trials: Callable[[str], Trial], kind: str, name: str) -> None:
    assert CHECKS[name](trials(kind))


@torch.no_grad()
def test_maps_that_share_an_input_are_those_of_the_facts(trial: Trial) -> None:
    """What estimates count with is what a run finds."""
    family = trial.family
    (stage,) = family.adapter.stages
    place = family.compute.place
    with walking(family.adapter):
        call = stage.first_call(place(family.base.read(stage.outer)), trial.padded_inputs(TASKS[0]), None)
        for index, block in enumerate(stage.blocks):
            with capture_inputs(block.linears) as given:
                output = block.run(block.local(place(family.base.read(block.names))), call)
            found = {frozenset(n for n in given if given[n] is given[name]) for name in given}
            known = stage.sharing(index)
            assert {frozenset(names) for names in known or ()} == found
            estimated = {name for group in likely_groups(stage, index) for name in group.names}
            assert estimated == set(block.maps)
            assert {stage.part(name) for name in block.maps} == {"attention", "mlp"}
            call = stage.advance(call, output)


def test_generated_answers_are_the_librarys(trial: Trial) -> None:
    """The model that generates has every tensor and buffer of its own."""
    family = trial.family
    batch = trial.padded_inputs(TASKS[0])
    generator = family.adapter.generating(family.base.read(family.adapter.tower), family.base_folder)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    library = trial.library("base", torch.float32)
    for row in range(2):
        length = int(batch["attention_mask"][row].sum())
        one = {name: tensor[row : row + 1, :length] for name, tensor in batch.items()}
        theirs = library.generate(**one, **options)[:, length:]
        assert generator.answers(one, **options).equal(theirs)


def test_settings_of_generation_that_are_set_aside_and_that_are_refused(tmp_path: Path) -> None:
    trial = fresh("gpt2", tmp_path)
    family, batch = trial.family, trial.padded_inputs(TASKS[0])
    file = family.base_folder / "generation_config.json"

    def answers(**stated: Any) -> Tensor:
        file.write_text(json.dumps(stated))
        generator = family.adapter.generating(family.base.read(family.adapter.tower), family.base_folder)
        return generator.answers(batch, max_new_tokens=3, do_sample=False, pad_token_id=0)

    plain = answers()
    for stated in (
        {"return_dict_in_generate": True},
        {"num_return_sequences": 2, "do_sample": True},
        {"stop_strings": ["w1"]},
        {"cache_implementation": "quantized"},
        {"prompt_lookup_num_tokens": 3},
    ):
        assert answers(**stated).equal(plain)
    with pytest.raises(InputError, match=r"settings in its generation_config\.json \(.*strictly positive"):
        answers(repetition_penalty=0)
    with pytest.raises(InputError, match=r"does not hold settings of generation .*max_new_tokens"):
        answers(max_new_tokens=0)
    file.write_text("{")
    with pytest.raises(InputError, match=r"generation_config\.json is not valid JSON"):
        read_generation_config(family.base_folder)
    assert any("generation_config.json is not valid JSON" in one for one in check_suite(trial.family.suite).problems)


HALF = ("gemma2", "gpt2", "phi3")


@pytest.mark.parametrize("kind", HALF)
def test_dtype_tokenizer_and_generation_config_are_kept(kind: str, tmp_path: Path) -> None:
    facts = ROWS[kind]
    trial = write_trial(tiny_decoder(facts), facts, tmp_path, torch.bfloat16)
    settings = {"temperature": 0.3, "do_sample": True, "eos_token_id": 1}
    (tmp_path / "merged" / "generation_config.json").write_text(json.dumps(settings))
    (tmp_path / "merged" / "tokenizer.model").write_bytes(b"pieces")
    template = tmp_path / "merged" / "additional_chat_templates" / "tool_use.jinja"
    template.parent.mkdir()
    template.write_text("{{ tools }}")
    config = tmp_path / "merged" / "config.json"
    stated = json.loads(config.read_text())
    code = {"AutoConfig": "configuration_own.OwnConfig", "AutoModel": "there/repo--modeling_own.OwnModel"}
    config.write_text(json.dumps({**stated, "auto_map": code}))
    calibrate(trial.family, trial.config()).save(tmp_path / "out")
    written, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "merged"))
    assert {n: (t.dtype, t.shape) for n, t in written.items()} == {n: (t.dtype, t.shape) for n, t in merged.items()}
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == settings
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == b"pieces"
    assert (tmp_path / "out" / template.relative_to(tmp_path / "merged")).read_text() == "{{ tools }}"
    assert "auto_map" not in json.loads((tmp_path / "out" / "config.json").read_text())  # one of its files is missing
    before, after = (measure_drift(trial.family, one, split="calibration") for one in ("merged", str(tmp_path / "out")))
    for task in TASKS:
        assert after.tasks[task].layers[-1].relative_drift < before.tasks[task].layers[-1].relative_drift


def rewritten(trial: Trial, root: Path, **options: Any) -> Path:
    """The trial's suite with other options in one expert's configuration."""
    import shutil

    shutil.copytree(trial.root, root, ignore=shutil.ignore_patterns("written"))
    file = root / "experts" / TASKS[0] / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **options}))
    return root / "suite.yaml"


CHANGED: dict[str, dict[str, Any]] = {
    "gemma2": {"attn_logit_softcapping": 9.0},
    "gemma3_text": {"query_pre_attn_scalar": 4},
    "gpt2": {"activation_function": "relu"},
    "mistral": {"sliding_window": 3},
    "olmo3": {"sliding_window": 3},
    "phi3": {"sliding_window": 3},
    "qwen2": {"sliding_window": 3},
    "smollm3": {"no_rope_layers": [1, 1]},
}


def test_experts_whose_forward_differs_are_refused(trial: Trial, tmp_path: Path) -> None:
    """Shapes agree, the options of the forward do not."""
    changed = CHANGED.get(trial.facts.model_type, {"rms_norm_eps": 0.1})
    with pytest.raises(InputError, match=f"expert 'left': {next(iter(changed))} is"):
        open_family(load_suite(rewritten(trial, tmp_path / "s", **changed)), "cpu")


def test_gpt2_files_of_the_hub_have_bare_names_and_masks(tmp_path: Path) -> None:
    """As openai-community/gpt2 has them: no prefix, and the causal mask of every block as a tensor."""
    trial = fresh("gpt2", tmp_path)
    expected = trial.family.base.read(trial.family.adapter.tower)
    file = tmp_path / "base" / "model.safetensors"
    bare = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 16, 16) for i in range(2)}
    save_file({**bare, **masks}, file, {"format": "pt"})
    again = open_family(load_suite(tmp_path / "suite.yaml"), "cpu")
    found = again.base.read(again.adapter.tower)
    assert all(found[name].equal(tensor) for name, tensor in expected.items())


def test_modules_of_sentence_transformers_with_weights_of_their_own_are_refused(tmp_path: Path) -> None:
    """A merge would keep their options and lose their weights; pooling alone has none."""
    fresh("llama", tmp_path)
    modules = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense"}
    for count, said in ((2, None), (3, r"base: a sentence-transformers folder with Dense in modules.json")):
        listed = [{"path": path, "type": f"models.{kind}"} for path, kind in [*modules.items()][:count]]
        for path in [*modules][1:count]:
            (tmp_path / "base" / path).mkdir(exist_ok=True)
            (tmp_path / "base" / path / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
        (tmp_path / "base" / "modules.json").write_text(json.dumps(listed))
        with nullcontext() if said is None else pytest.raises(InputError, match=said):
            open_family(load_suite(tmp_path / "suite.yaml"), "cpu")


def test_texts_longer_than_the_table_of_positions_are_refused(tmp_path: Path) -> None:
    trial = fresh("gpt2", tmp_path)
    adapter = trial.family.adapter
    ids = torch.ones(1, 17, dtype=torch.long)
    assert adapter.misfit({"input_ids": ids[:, :16]}) is None
    generator = adapter.generating(trial.family.base.read(adapter.tower), trial.family.base_folder)
    batch = {"input_ids": ids[:, :14], "attention_mask": ids[:, :14]}
    new = generator.answers(batch, max_new_tokens=64, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert new.shape == (1, 3)  # the last one is not read any more
    assert generator.log_probabilities(batch, [new[0]])[0].shape == (3, 32)
    assert "texts of 17 tokens, the model has 16 positions" in str(adapter.misfit({"input_ids": ids}))
    beside = {"input_ids": ids[:, :14].repeat(2, 1), "attention_mask": torch.ones(2, 14, dtype=torch.long)}
    beside["attention_mask"][1, 3:] = 0
    both = generator.answers(beside, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
    short = {name: tensor[1:, :3] for name, tensor in beside.items()}
    alone = generator.answers(short, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert both[0].tolist() == [*new[0].tolist(), 0, 0, 0, 0, 0]
    assert both[1:].equal(alone)
    generator.model.generation_config.eos_token_id = 0  # padding is no end, though the end is what pads
    given = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "suppress_tokens": [0]}
    apart = generator.each_answer(beside, **given)
    assert [len(one) for one in apart] == [3, 8]
    found = generator.log_probabilities(beside, apart)
    assert [one.shape for one in found] == [(3, 32), (8, 32)]
    for length, answer, own in zip((14, 3), apart, found, strict=True):
        text = torch.cat([ids[0, :length], answer[:-1]])
        with torch.no_grad():
            scores = generator.model(input_ids=text[None]).logits[0, length - 1 :]
        torch.testing.assert_close(own, scores.log_softmax(-1), rtol=1e-5, atol=1e-5)


def test_beta_does_not_apply_where_a_norm_stands_before_the_stream(tmp_path: Path) -> None:
    """Gemma-2's output maps are fitted with beta as without; Qwen3's are not."""
    for kind, moves in (("gemma2", False), ("qwen3", True)):
        trial = fresh(kind, tmp_path / kind)
        without, with_beta = (
            calibrate(trial.family, trial.config(recipe="refined", beta=beta)).weights.read(trial.family.adapter.tower)
            for beta in (0.0, 0.5)
        )
        assert moves == any(not without[name].equal(with_beta[name]) for name in without)


def test_an_attention_with_sinks_is_refused() -> None:
    """A kernel that ignored them would give other numbers without a word."""
    from featcal.models.attention import _forward

    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(InputError, match="sinks"):
        _forward(torch.nn.Module(), q, q, q, None, s_aux=torch.zeros(2))


@pytest.mark.parametrize(
    ("kind", "options", "check", "says"),
    [
        ("llama", {"parts": PRE_NORM[::-1]}, "informed", "its residual parts are not the whole block"),
        ("gemma2", {"norm_offset": 0.0}, "norms", r"Gemma2RMSNorm is not weight \* x / rms\(x\)"),
        ("gemma3_text", {"head_axis": 2}, "norms", "einsum|differ from the second computation"),
        ("gemma2", {"softcap": ""}, "replay", "scores"),
        ("qwen3", {"head_axis": None}, "norms", r"its input has shape"),
        ("mixtral", {"experts": ExpertFacts(maps=("w3", "w1", "w2"))}, "replay", "model.layers.0"),
    ],
)
def test_facts_that_are_not_true_are_found(
    kind: str, options: dict[str, Any], check: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    false = replace(ROWS[kind], **options)
    monkeypatch.setitem(registry._FACTS, kind, false)
    trial = write_trial(tiny_decoder(false), false, tmp_path)
    with pytest.raises((AssertionError, InputError, RuntimeError), match=says):
        CHECKS[check](trial)


def test_rows_of_featcals_own_are_not_replaced() -> None:
    with pytest.raises(InputError, match="'llama' is an architecture of featcal's own"):
        register_decoder(replace(ROWS["llama"], head_axis=2))


MAPS = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")


@pytest.mark.parametrize("method", ["wudi-optimum", "iso-cts", "tsv-m", "ace", "svc"])
def test_matrices_that_are_stored_the_other_way_round_are_merged_as_maps(method: str, tmp_path: Path) -> None:
    """What a method gives for GPT-2's [inputs, outputs] is the transpose of what it gives for [outputs, inputs]."""
    from featcal.baselines.svc import Svc, calibrate_matrix, svc
    from featcal.formats.weights import InMemory
    from featcal.mergers.common.engine import RecipeWeights
    from featcal.suite.recipe import MergeRecipe

    family = fresh("gpt2", tmp_path).family
    names = [name for name in family.adapter.tower if name.endswith(MAPS)]
    assert family.adapter.transposed_weights == set(names)

    def turned(model: Any) -> InMemory:
        return InMemory(model.label, {name: tensor.mT.contiguous() for name, tensor in model.read(names).items()})

    base, merged, experts = turned(family.base), turned(family.merged), [*map(turned, family.experts.values())]
    if method == "svc":
        ours = svc(family.run(), family.experts, family.merged, Svc(alpha=0.1)).read(names)
        one = {n: [m.tensors[n].double() for m in (base, merged, *experts)] for n in names}
        theirs = {n: calibrate_matrix(first, second, rest, 0.1).float() for n, (first, second, *rest) in one.items()}
    else:
        recipe = MergeRecipe(method=method)  # type: ignore[arg-type]
        ours = family.merge(recipe).read(names)
        theirs = RecipeWeights(recipe, base, dict(zip(TASKS, experts, strict=True)), names).read(names)
    for name in names:
        torch.testing.assert_close(ours[name].mT, theirs[name], rtol=1e-5, atol=1e-6)


def lora_suite(trial: Trial, modules: list[str], **options: Any) -> tuple[Path, dict[str, torch.Tensor]]:
    """The trial with a LoRA of rank 2 on some maps as one expert; B A times 2 of every map."""
    generator, factors, updates = torch.Generator().manual_seed(1), {}, {}
    for block in trial.family.adapter.blocks():
        for name, module in block.linears.items():
            if name.endswith(tuple(modules)):
                inputs, outputs = widths(module)
                a, b = torch.randn(2, inputs, generator=generator), torch.randn(outputs, 2, generator=generator)
                key = f"base_model.model.{block.name}.{name}"
                factors |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
                updates[f"{block.name}.{name}.weight"] = 2 * b @ a
    (trial.root / "adapter").mkdir()
    save_file(factors, trial.root / "adapter" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": modules, "bias": "none", **options}
    (trial.root / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    suite = trial.root / "suite.yaml"
    suite.write_text(suite.read_text().replace(f"experts/{TASKS[0]}", "base+adapter"))
    return suite, updates


def test_a_lora_on_gpt2_is_added_as_its_maps_are_stored(tmp_path: Path) -> None:
    trial = fresh("gpt2", tmp_path)
    before = trial.family.base.read(trial.family.adapter.tower)
    suite, updates = lora_suite(trial, ["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)
    family = open_family(load_suite(suite), "cpu")
    for name, tensor in family.experts[TASKS[0]].read(family.adapter.tower).items():
        expected = before[name] + updates[name].mT if name in updates else before[name]
        torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("kind", "module", "said"), [("gpt2", "attn.c_proj", False), ("olmo2", "o_proj", True)])
def test_a_lora_that_is_meant_for_the_other_orientation_is_refused(
    kind: str, module: str, said: bool, tmp_path: Path
) -> None:
    """Square maps, whose shapes show nothing."""
    trial = fresh(kind, tmp_path)
    suite, _ = lora_suite(trial, [module], fan_in_fan_out=said)
    with pytest.raises(InputError, match=f"fan_in_fan_out in adapter_config.json must be {str(not said).lower()} for"):
        open_family(load_suite(suite), "cpu")
