"""Every obstacle between a written folder and another program is found, and nothing is taken for one that is none."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Run, document
from known_layouts import CHATML, edit, lm_mini_as_qwen, wrap_names
from safetensors.torch import load_file, save_file

from featcal.cli.hand_over import say_where_to
from featcal.export.write import rewrite
from featcal.preflight.handover.base import find_base
from featcal.preflight.handover.check import check_for, complete_folder
from featcal.preflight.handover.folder import Folder
from featcal.preflight.handover.generation import find_turns
from featcal.preflight.handover.runtimes import SUPPORT, TARGETS
from featcal.preflight.handover.sentence_modules import check_modules
from featcal.preflight.handover.weights import repeats_embedding
from featcal.system.errors import InputError
from featcal.system.resources import data_path

Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lm_mini_as_qwen(tmp_path_factory.mktemp("known") / "base")


@pytest.fixture
def folder(base: Path, tmp_path: Path) -> Path:
    """A model of the base's layout, to be damaged."""
    return Path(shutil.copytree(base, tmp_path / "My merge"))


def change_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return damage


def change_tokenizer(change: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(folder: Path) -> None:
        content = json.loads((folder / "tokenizer.json").read_text())
        change(content)
        (folder / "tokenizer.json").write_text(json.dumps(content))

    return damage


def be_gemma(folder: Path) -> None:
    edit(folder / "config.json", architectures=["Gemma2ForCausalLM"])


def shard_without_the_second(folder: Path) -> None:
    names = list(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    places = dict.fromkeys(names, "model-00001-of-00002.safetensors") | {"more": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def leave_a_training_state(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "global_step5").mkdir()


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "transformer.word_embeddings.weight"])
def test_a_stored_head_may_repeat_the_embedding_whatever_its_name(name: str, tmp_path: Path) -> None:
    table = torch.arange(12.0).reshape(4, 3)
    save_file({name: table, "lm_head.weight": table.clone()}, tmp_path / "model.safetensors")
    assert repeats_embedding(Folder(tmp_path), "lm_head.weight")
    save_file({name: table, "lm_head.weight": 1 + table}, tmp_path / "model.safetensors")
    assert not repeats_embedding(Folder(tmp_path), "lm_head.weight")


FAULTS: dict[str, tuple[Damage, str]] = {
    "no tokenizer.model": (be_gemma, "tokenizer.model is missing, from which the converter makes"),
    "no merges": (change_tokenizer(lambda own: own["model"].pop("merges")), "BPE without its merges"),
    "a training state": (leave_a_training_state, "there is no model.safetensors; it holds a checkpoint of DeepSpeed"),
    "a shard is missing": (shard_without_the_second, "not there: 'model-00002-of-00002.safetensors'"),
    "names of a wrapper": (wrap_names, "are called as in a model of pictures and text"),
    "another dtype": (
        change_tensors(lambda own: own.update({name: one.double() for name, one in own.items() if one.ndim == 2})),
        "stored in F64",
    ),
    "no head": (lambda own: edit(own / "config.json", tie_word_embeddings=False), "there is no lm_head.weight"),
    "two heads": (
        change_tensors(lambda own: own.update({"lm_head.weight": 1 + own["model.embed_tokens.weight"]})),
        "lm_head.weight has other values",
    ),
    "half-written": (lambda own: own.with_name(f"{own.name}.partial").mkdir(), "'My merge.partial' is left from a run"),
    "no class": (lambda own: edit(own / "config.json", architectures=None), "names no 'architectures'"),
    "no tokenizer": (lambda own: (own / "tokenizer.json").unlink(), "there is no tokenizer beside the weights"),
    "other options": (
        lambda own: edit(own / "tokenizer_config.json", eos_token="<|endoftext|>"),
        "is not the base's in 'eos_token' (eos_token is '<|endoftext|>', in the base '<|im_end|>')",
    ),
    "other rules": (
        change_tokenizer(lambda own: own.update(normalizer={"type": "Lowercase"})),
        "cuts a text into other tokens than the base's",
    ),
    "another vocabulary": (
        change_tokenizer(lambda own: own["model"]["vocab"].update(a=4, b=3)),
        "its tokenizer differs in 2 of the base's",
    ),
    "ids beyond the rows": (
        change_tokenizer(lambda own: own["model"]["vocab"].update(new=400)),
        "ids up to 400, the embedding only 242 rows",
    ),
    "vocab_size": (lambda own: edit(own / "config.json", vocab_size=250), "vocab_size 250, the embedding has 242 rows"),
    "no generation options": (lambda own: (own / "generation_config.json").unlink(), "which the base has"),
    "an end that is none": (lambda own: edit(own / "generation_config.json", eos_token_id=[1, 300]), "token 300"),
    "no chat template": (lambda own: (own / "chat_template.jinja").unlink(), "there is no chat template, and the base"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(folder: Path, base: Path, fault: str) -> None:
    damage, sentence = FAULTS[fault]
    damage(folder)
    (found,) = check_for(folder, ["gguf"], str(base)).handovers
    assert [one.sentence for one in found.problems if sentence in one.sentence], found.problems
    # The damaged weights of some are no others' fault, but nothing else is wrong with the rest.
    assert len(found.problems) <= 2
    assert "convert_hf_to_gguf.py" not in " ".join(found.commands)


def test_all_faults_are_found_at_once(folder: Path, base: Path, run: Run) -> None:
    faults = ("no merges", "names of a wrapper", "another dtype", "half-written", "vocab_size", "no chat template")
    for fault in faults:
        FAULTS[fault][0](folder)
    code, out, _ = run("check", folder, "--for", "gguf", "--base", base, "--json")
    found = json.loads(out)["targets"]["gguf"]
    assert code == 1
    for fault in faults:
        assert [one for one in found["problems"] if FAULTS[fault][1] in one["sentence"]], fault
    _, _, err = run("check", folder, "--for", "gguf", "--base", base)
    assert f"{len(found['problems'])} problem(s)" in err


def test_a_known_layout_passes_and_the_commands_follow(folder: Path, base: Path, run: Run) -> None:
    found = document(run("check", folder, *(f"--for={one}" for one in TARGETS[:3]), "--base", base, "--json"))
    assert found["ok"]
    assert found["compared"]
    commands = {target: one["commands"] for target, one in found["targets"].items()}
    assert commands["gguf"][2] == (
        f"python llama.cpp/convert_hf_to_gguf.py '{folder}' --outtype f16 --outfile my-merge-f16.gguf"
    )
    assert commands["vllm"] == [f"vllm serve '{folder}'"]
    # The Modelfile is not there yet, so the way begins with what writes it.
    out = f"'{folder}-ollama'"
    assert commands["ollama"] == [
        f"featcal export '{folder}' --for ollama --base {base} --out {out}",
        *commands["gguf"][:2],
        f"python llama.cpp/convert_hf_to_gguf.py {out} --outtype f16 --outfile {out[:-1]}/my-merge-ollama.gguf'",
        f"ollama create my-merge-ollama -f {out[:-1]}/Modelfile'",
        "ollama run my-merge-ollama",
    ]
    assert found["targets"]["ollama"]["files"]["Modelfile"].startswith("FROM ./my-merge-ollama.gguf\n")
    code, out, err = run("check", folder, "--for", "gguf", "--base", base)
    assert (code, err) == (0, "")
    assert "no problems found" in out
    assert f"\n    {commands['gguf'][3]}\n" in out


@pytest.mark.parametrize(
    "content", ["{", "[]", "null", "3", '{"model": [1]}', '{"model": {"vocab": {"a": "b"}}}', '{"a": {}}']
)
def test_damaged_files_are_problems_and_nothing_worse(folder: Path, base: Path, content: str) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json", "modules.json"):
        before = (folder / name).read_bytes() if (folder / name).exists() else None
        (folder / name).write_text(content)
        found = check_for(folder, TARGETS, str(base))
        assert not found.is_ready
        if name == "tokenizer.json":
            assert "tokenizer.json is no tokenizer that can be read" in found.handovers[0].problems[0].sentence
        (folder / name).unlink() if before is None else (folder / name).write_bytes(before)


def test_an_encoder_is_asked_for_embeddings(folder: Path) -> None:
    edit(folder / "config.json", architectures=["Qwen3Model"])
    found = {one.target: one for one in check_for(folder, TARGETS[:3]).handovers}
    (folder / "chat_template.jinja").unlink()
    assert [one.commands[-1].split()[0] for one in found.values()] == ["llama-embedding", "vllm", "curl"]
    assert not [note for one in found.values() for note in one.notes if "chat template" in note]


def test_what_nobody_can_know_is_said_and_is_no_problem(folder: Path) -> None:
    edit(folder / "config.json", architectures=["BrandNewForCausalLM"])
    found = check_for(folder, TARGETS[:3])
    assert found.is_ready
    for one in found.handovers:
        assert [note for note in one.notes if f"unknown whether {one.target} runs BrandNewForCausalLM" in note]
        assert [note for note in one.notes if "name it with --base" in note]


def test_a_tokenizer_of_our_own_is_refused_where_a_vocabulary_is_made_of_it() -> None:
    found = {one.target: one for one in check_for(data_path("lm-mini", "base"), TARGETS[:3]).handovers}
    assert "holds a WordLevel vocabulary" in found["gguf"].problems[0].sentence
    assert found["vllm"].problems == ()


def test_a_record_names_the_base(tmp_path: Path) -> None:
    (tmp_path / "featcal.json").write_text(json.dumps({"suite_file": {"shipped": "lm-mini"}}))
    found = find_base(tmp_path, None)
    assert found.folder is not None
    assert found.folder.path == data_path("lm-mini", "base").resolve()
    (tmp_path / "featcal.json").unlink()
    (tmp_path / "README.md").write_text("---\nbase_model:\n- owner/expert\n- owner/never-fetched\n---\n")
    assert find_base(tmp_path, None).ref == ""
    recipe = "merge_method: task_arithmetic\nbase_model: owner/never-fetched\nmodels:\n- model: owner/expert\n"
    (tmp_path / "mergekit_config.yml").write_text(f"{recipe}  parameters: {{weight: 1}}\n")
    found = find_base(tmp_path, None)
    assert (found.ref, found.folder) == ("owner/never-fetched", None)
    assert "hf download owner/never-fetched --exclude" in next(found.notes)
    with pytest.raises(InputError, match="'owner/never-fetched' is not on this machine; fetch it first: hf download"):
        check_for(data_path("lm-mini", "base"), ["gguf"], "owner/never-fetched")


def test_export_without_a_base_says_that_nothing_was_written(folder: Path, tmp_path: Path, run: Run) -> None:
    for name in ("featcal.json", "README.md"):
        (folder / name).unlink(missing_ok=True)
    code, _, err = run("export", folder, "--for", "vllm", "--out", tmp_path / "out")
    assert (code, (tmp_path / "out").exists()) == (1, False)
    assert "nothing was written: what vllm needs is copied from beside the base's weights" in err


def test_export_adds_what_the_base_has(
    folder: Path, base: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    own = tmp_path / "own"
    shutil.copytree(base, own)
    (own / "tokenizer.model").write_bytes(b"pieces")
    (own / "chat_template.jinja").unlink()  # as in older folders, whose options hold it
    edit(own / "tokenizer_config.json", chat_template=CHATML)
    (repair,) = check_for(folder, ["ollama"], str(own)).handovers[0].commands
    assert repair == f"featcal export '{folder}' --for ollama --base {own} --out '{folder}-ollama'"
    monkeypatch.chdir(folder)
    (here,) = check_for(Path("."), ["ollama"], str(own)).handovers[0].commands
    assert here == f"featcal export . --for ollama --base {own} --out '../{folder.name}-ollama'"
    out = tmp_path / "out"
    found = document(run("export", folder, "--for", "ollama", "--base", own, "--out", out, "--json"))
    assert found["added"] == [
        "Modelfile", "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    ]  # fmt: skip
    assert found["ok"]
    assert set(found["added"]) <= set(found["written"])
    assert (out / "tokenizer.model").read_bytes() == b"pieces"
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert torch.equal(load_file(out / "model.safetensors")[name], tensor)
    modelfile = (out / "Modelfile").read_text()
    assert modelfile.startswith("FROM ./out.gguf\nTEMPLATE")
    assert f"--outfile {out}/out.gguf" in found["targets"]["ollama"]["commands"][2]
    assert found["targets"]["ollama"]["files"] == {}
    assert modelfile.endswith('PARAMETER stop "<|im_end|>"\n')


def test_a_tokenizer_is_never_made_of_two(folder: Path, base: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(base, tmp_path / "other"))
    FAULTS["another vocabulary"][0](other)
    (other / "added_tokens.json").write_text("{}")
    (other / "generation_config.json").unlink()
    (folder / "chat_template.jinja").unlink()
    assert set(complete_folder(folder, [], tmp_path / "out", str(other))[0]) == {"chat_template.jinja"}
    with pytest.raises(InputError, match="name it with --base"):
        complete_folder(folder, [], tmp_path / "out")
    assert set(complete_folder(folder, ["ollama"], tmp_path / "out")[0]) == {"Modelfile"}


TEMPLATES = {
    "chatml": (CHATML, True),
    "llama 3": (
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant"
        "<|end_header_id|>\n\n{% endif %}",
        True,
    ),
    "system in the first turn": (
        "{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}{% set ms = messages[1:] %}"
        "{% else %}{% set first = '' %}{% set ms = messages %}{% endif %}{% for m in ms %}<start_of_turn>{{ m.role }}\n"
        "{% if loop.first %}{{ first }}{% endif %}{{ m.content }}<end_of_turn>\n{% endfor %}<start_of_turn>model\n",
        False,
    ),
    "a default of its own": ("{% if messages[0].role != 'system' %}Be kind.{% endif %}" + CHATML, False),
    "no program": ("{{ raise_exception('no') }}", False),
    "signs of Go": (CHATML.replace("<|im_end|>", "{{'{{'}}"), False),
}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_template_is_turned_into_go_only_where_that_is_the_same(folder: Path, kind: str) -> None:
    template, plain = TEMPLATES[kind]
    (folder / "chat_template.jinja").write_text(template)
    edit(folder / "tokenizer_config.json", bos_token="<s>")
    turns = find_turns(Folder(folder))
    assert (turns is not None and turns.to_go() is not None) == plain
    if turns is None or not plain:
        return
    assert turns.start == ""  # Ollama adds the start token by itself
    go = turns.to_go() or ""
    assert go.count("{{ .Content }}") == 3
    for role in ("system", "user", "assistant"):
        assert f'eq .Role "{role}" }}}}{turns.before[role]}{{{{ .Content }}}}{turns.after[role]}' in go
    assert go.endswith(turns.prompt)
    assert "user" in turns.before["user"]
    assert "assistant" in turns.prompt


@pytest.fixture
def sentences(tmp_path: Path) -> Path:
    """The files, without weights, of an encoder of sentences with a Dense module."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_Normalize": "Normalize"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    config = {"architectures": ["BertModel"], "model_type": "bert", "hidden_size": 16, "max_position_embeddings": 32}
    pooling = {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True}
    files: dict[str, Any] = {"config.json": config, "modules.json": modules, "1_Pooling/config.json": pooling}
    files |= {"sentence_bert_config.json": {"max_seq_length": 32}}
    files |= {"2_Dense/config.json": {"in_features": 16, "out_features": 8}}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    save_file({"linear.weight": torch.zeros(8, 16)}, tmp_path / "2_Dense" / "model.safetensors")
    return tmp_path


MODULES: dict[str, tuple[Damage, str]] = {
    "none": (lambda own: (own / "modules.json").unlink(), "there is no modules.json"),
    "pooling": (lambda own: (own / "1_Pooling" / "config.json").unlink(), "1_Pooling/config.json is missing"),
    "width": (lambda own: edit(own / "1_Pooling/config.json", word_embedding_dimension=24), "what comes in has 16"),
    "mode": (lambda own: edit(own / "1_Pooling/config.json", pooling_mode_mean_tokens=False), "switches no kind"),
    "length": (lambda own: edit(own / "sentence_bert_config.json", max_seq_length=64), "the model has 32 positions"),
    "no length": (lambda own: (own / "sentence_bert_config.json").unlink(), "texts would be cut at 32 tokens"),
    "dense": (lambda own: (own / "2_Dense" / "model.safetensors").unlink(), "2_Dense/model.safetensors is missing"),
    "shape": (lambda own: edit(own / "2_Dense/config.json", out_features=9), "linear.weight is [8, 16]"),
    "first": (lambda own: (own / "modules.json").write_text("[]"), "begins with nothing"),
}


@pytest.mark.parametrize("fault", MODULES)
def test_a_module_of_sentence_transformers_that_does_not_fit_is_found(sentences: Path, fault: str) -> None:
    assert list(check_modules(Folder(sentences))) == []
    damage, sentence = MODULES[fault]
    damage(sentences)
    (found, *others) = check_modules(Folder(sentences))
    assert sentence in found.sentence
    assert not others


@pytest.mark.parametrize(("most", "found"), [(24, 0), (10**30, 1), (None, 1)])
def test_the_length_of_texts_may_be_the_tokenizers(sentences: Path, most: int | None, found: int) -> None:
    """Newer versions of sentence-transformers save it there alone."""
    (sentences / "sentence_bert_config.json").write_text(json.dumps({"transformer_task": "feature-extraction"}))
    (sentences / "tokenizer_config.json").write_text(json.dumps({} if most is None else {"model_max_length": most}))
    assert len(list(check_modules(Folder(sentences)))) == found


def test_what_is_no_folder_of_transformers_is_refused(tmp_path: Path, run: Run) -> None:
    code, _, err = run("check", tmp_path / "nothing", "--for", "gguf")
    assert (code, "no folder" in err) == (1, True)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "is an adapter without its model" in run("check", tmp_path, "--for", "gguf")[2]
    (tmp_path / "open_clip_config.json").write_text("{}")
    (tmp_path / "adapter_config.json").unlink()
    assert "has the layout of open_clip" in run("check", tmp_path, "--for", "vllm")[2]
    assert run("check", "lm-mini", "--base", "x")[0] == 2
    assert run("check", tmp_path, "--for", "gguf", "--no-probe")[0] == 2
    assert run("export", tmp_path, "--for", "gguf", "--format", "open_clip", "--out", tmp_path / "out")[0] == 2


def test_names_in_the_table_are_those_of_gguf_and_of_transformers() -> None:
    import transformers

    gguf = pytest.importorskip("gguf", reason="the table of architectures is held against the package gguf")
    assert {one.gguf for one in SUPPORT.values()} - {""} <= {*gguf.MODEL_ARCH_NAMES.values()}
    assert SUPPORT.keys() <= {*dir(transformers)}  # each would be imported if it was asked for


@pytest.mark.slow
def test_a_written_model_goes_through_gguf_and_back(folder: Path, tmp_path: Path) -> None:
    """Its tensors under gguf's own names, read by transformers' own reader, give the same logits."""
    gguf = pytest.importorskip("gguf", reason="writes the file")
    pytest.importorskip("accelerate", reason="transformers reads GGUF with it")
    from transformers import AutoConfig, AutoModelForCausalLM

    rewrite(folder, tmp_path / "written")
    folder = tmp_path / "written"
    config, file = json.loads((folder / "config.json").read_text()), tmp_path / "model.gguf"
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == SUPPORT["Qwen3ForCausalLM"].gguf)
    table = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(file, "qwen3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        named = table.get_name(name, try_suffixes=(".weight", ".bias"))
        assert named is not None, name
        writer.add_tensor(named, tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ids = torch.randint(0, config["vocab_size"], (2, 24), generator=torch.Generator().manual_seed(0))
    own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # The library's reader of this architecture's options leaves out the width of a head.
    options = AutoConfig.from_pretrained(folder)
    back = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, config=options, dtype=torch.float32)
    with torch.no_grad():
        assert float((own(ids).logits - back(ids).logits).abs().max()) <= 1e-5


@pytest.mark.parametrize(
    ("config", "targets"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, ["gguf", "vllm", "ollama"]),
        ({"architectures": ["LlamaForCausalLM"], "quantization_config": {}}, ["vllm"]),
        ({"architectures": ["GPT2LMHeadModel"]}, ["gguf", "vllm"]),
        ({"architectures": ["CLIPModel"]}, ["vllm"]),
        ({"architectures": ["ViTModel"], "quantization_config": {}}, []),
        ({}, []),
    ],
)
def test_the_next_command_names_programs_that_take_the_folder(
    config: dict[str, Any], targets: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "my merge"
    out.mkdir()
    (out / "config.json").write_text(json.dumps(config))
    say_where_to(str(out))
    said = capsys.readouterr().out.removeprefix("to hand it on: ")
    assert shlex.split(said) == (
        ["featcal", "check", str(out), *(w for t in targets for w in ("--for", t))] if targets else []
    )
