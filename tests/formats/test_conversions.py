"""Folders that are not read as they are: what they are called, and that the commands for them work."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from featcal.family.differences import list_differences
from featcal.formats.checkpoint import stored_names
from featcal.formats.conversions import explain_training_state, untie_base
from featcal.formats.locate import locate
from featcal.models.families.registry import adapter_for
from featcal.system.errors import InputError

STATES = {
    "DeepSpeed": (["global_step5", "latest", "rng_state_0.pth", "zero_to_fp32.py"], "global_step5"),
    "FSDP": (["optimizer_0", "pytorch_model_fsdp_0", "scheduler.pt"], "pytorch_model_fsdp_0"),
    "Lightning": (["epoch=1.ckpt", "last.ckpt"], "last.ckpt"),
}


@pytest.mark.parametrize("whose", STATES)
def test_what_a_training_run_leaves_is_named_with_the_command_that_converts_it(tmp_path: Path, whose: str) -> None:
    names, found = STATES[whose]
    folder = tmp_path / "a run"
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    with pytest.raises(InputError, match=f"no model.safetensors in .*; it holds a checkpoint of {whose}") as caught:
        stored_names(folder, "expert 'x'")
    assert f"('{found}')" in str(caught.value)
    command = shlex.split(str(caught.value).splitlines()[-1])
    ends = {
        "DeepSpeed": ["deepspeed.utils.zero_to_fp32", str(folder), str(folder), "--safe_serialization"],
        "FSDP": ["accelerate", "merge-weights", f"{folder}/{found}", str(folder)],
        "Lightning": [f"{folder}/{found}", f"{folder}/model.safetensors"],
    }
    assert command[-len(ends[whose]) :] == ends[whose]
    # Weights of the whole model beside it are read.
    assert explain_training_state(folder, [*names, "pytorch_model.bin"]) == ""
    assert explain_training_state(folder, ["config.json", "optimizer.pt"]) == ""


def run_last_line(message: str, *more: str) -> None:
    """Run the command at the end of a message, with this Python and what is installed beside it."""
    program, *rest = shlex.split(message.splitlines()[-1])
    path = sys.executable if program == "python" else str(Path(sys.executable).with_name(program))
    subprocess.run([path, *rest[: len(rest) - len(more)], *more], check=True, capture_output=True)


@pytest.mark.slow
def test_the_command_for_lightning_works(tmp_path: Path) -> None:
    state = {"model.lm_head.weight": torch.ones(2, 3), "model.model.norm.weight": torch.zeros(3)}
    torch.save({"state_dict": state, "epoch": 3, "hyper_parameters": {"lr": 0.1}}, tmp_path / "last.ckpt")
    run_last_line(explain_training_state(tmp_path, ["last.ckpt"]))
    found = load_file(tmp_path / "model.safetensors")
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "lm_head.weight": [[1.0] * 3] * 2,
        "model.norm.weight": [0.0] * 3,
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, of a process alone
@pytest.mark.parametrize("where", ["pytorch_model_fsdp_0", "."])
def test_the_command_for_fsdp_works(tmp_path: Path, where: str) -> None:
    pytest.importorskip("accelerate")
    import torch.distributed.checkpoint as distributed

    state = {"model": {"lm_head.weight": torch.arange(6.0).reshape(2, 3), "norm.weight": torch.ones(3)}}
    distributed.save(state, checkpoint_id=tmp_path / where, no_dist=True)
    run_last_line(explain_training_state(tmp_path, [one.name for one in tmp_path.iterdir()]))
    found = load_file(tmp_path / "model.safetensors")
    assert all(found[name].equal(tensor) for name, tensor in state["model"].items())
    assert len(found) == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_command_that_unties_a_base_works(tmp_path: Path, kind: str) -> None:
    from tokenizers import Tokenizer, models
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    own = LlamaConfig(**sizes, vocab_size=20, tie_word_embeddings=True)
    other = GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=8, vocab_size=20, bos_token_id=0, eos_token_id=1)
    base = LlamaForCausalLM(own) if kind == "llama" else GPT2LMHeadModel(other)
    base.bfloat16().save_pretrained(tmp_path / "base")
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "base")
    run_last_line(untie_base({"lm_head.weight": "the embedding"}), str(tmp_path / "base"), str(tmp_path / "own head"))
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "own head"))
    embedding = next(name for name in before if name.endswith(("embed_tokens.weight", "wte.weight")))
    assert after.keys() - before.keys() == {"lm_head.weight"}
    assert all(after[name].equal(tensor) for name, tensor in before.items())
    assert after["lm_head.weight"].equal(before[embedding])
    assert json.loads((tmp_path / "own head/config.json").read_text())["tie_word_embeddings"] is False
    assert (tmp_path / "own head/tokenizer.json").is_file()


@pytest.mark.slow
def test_the_command_that_saves_a_base_anew_leaves_out_a_head_that_repeats_its_embedding(tmp_path: Path) -> None:
    """Old pickles of T5 hold both; experts that were trained from them are saved without the head."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"d_model": 8, "d_kv": 4, "num_heads": 2, "d_ff": 16, "num_layers": 1, "vocab_size": 20}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))
    for folder in ("base", "expert"):
        model.save_pretrained(tmp_path / folder)
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "base" / "pytorch_model.bin")

    def differences(base: str) -> list[str]:
        found, expert = (locate(str(tmp_path / one), tmp_path, one) for one in (base, "expert"))
        adapter = adapter_for(found.config, found.names, torch.device("cpu"), base)
        return list_differences(adapter, expert.open(adapter.canonical, adapter.aliases), expert.config)

    (problem,) = differences("base")
    assert problem.startswith("expert: it has no head beside its embedding, and the base's file holds 'lm_head.weight'")
    run_last_line(problem, str(tmp_path / "base"), str(tmp_path / "anew"))
    assert differences("anew") == []
    anew = load_file(tmp_path / "anew" / "model.safetensors")
    assert anew["shared.weight"].equal(model.state_dict()["shared.weight"])


def test_only_a_tied_head_can_be_untied() -> None:
    assert untie_base({}) == ""
    assert untie_base({f"{stack}.embed_tokens.weight": "shared.weight" for stack in ("encoder", "decoder")}) == ""
