"""What stops a run whose blocks the library calls otherwise than featcal replays them: masks of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_text import TASKS, write_text_suite

from featcal import InputError, load_suite, measure_drift, open_family
from featcal.calibration.calibrate import calibrate_to_folder, config_for
from featcal.drift.decomposition import follow
from featcal.family import Family
from featcal.models import llama
from featcal.models.adapter import Adapter, Batch
from featcal.models.features import final_features
from featcal.models.lane import Kept
from featcal.models.replay import check_first_batch

WINDOWED = r"model\.layers\.1: transformers calls this block with other arguments"


@pytest.fixture
def sliding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Family:
    """A language model whose blocks after the first one look back 4 tokens, as Mistral's and Gemma's do; opened past
    the check of its probe."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm, Qwen2RotaryEmbedding

    for name, other in {
        "LlamaConfig": Qwen2Config,
        "LlamaForCausalLM": Qwen2ForCausalLM,
        "LlamaRotaryEmbedding": Qwen2RotaryEmbedding,
    }.items():
        monkeypatch.setattr(llama, name, other)
    monkeypatch.setattr(llama.DecoderStage, "norm", Qwen2RMSNorm)
    monkeypatch.setattr("featcal.family.check_replay", lambda *_: None)
    suite = write_text_suite(tmp_path / "suite", "llama")
    for file in suite.parent.rglob("config.json"):
        config = json.loads(file.read_text())
        config |= {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
        file.write_text(json.dumps(config))
        biased(file.parent / "model.safetensors")
    return open_family(load_suite(suite), "cpu")


def biased(file: Path) -> None:
    """Llama's tensors with the biases of queries, keys and values that Qwen has."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    for name, weight in list(tensors.items()):
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            tensors[name.replace("weight", "bias")] = torch.zeros(len(weight))
    save_file(tensors, file, {"format": "pt"})


def test_a_window_of_some_blocks_stops_every_run(sliding: Family, tmp_path: Path) -> None:
    """The block is named, and nothing is left where the model was to be written."""
    with pytest.raises(InputError, match=WINDOWED):
        measure_drift(sliding)
    with pytest.raises(InputError, match=WINDOWED):
        calibrate_to_folder(sliding, config_for(sliding), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    batch = sliding.samples(TASKS[0], "test", 4, 0).inputs
    with pytest.raises(InputError, match=WINDOWED):
        final_features(sliding.adapter, sliding.base, {}, [batch], sliding.compute)


def test_a_window_that_no_text_reaches_is_no_matter(sliding: Family) -> None:
    """The masks of all blocks hold the same values then, and the states are the library's own."""
    short = {name: tensor[:, :3] for name, tensor in sliding.samples(TASKS[0], "test", 4, 0).inputs.items()}
    check_first_batch(sliding.adapter, short)
    ids, mask = short["input_ids"], short["attention_mask"]
    ours = final_features(sliding.adapter, sliding.base, {}, [{"input_ids": ids, "attention_mask": mask}],
                          sliding.compute)  # fmt: skip
    library = sliding.adapter.whole(sliding.base.read(sliding.adapter.tower), sliding.base_folder)
    states = library.model(ids, attention_mask=mask).last_hidden_state
    rows = torch.arange(len(ids))
    torch.testing.assert_close(ours, states[rows, mask.sum(1) - 1], rtol=1e-5, atol=1e-5)


def test_the_check_is_of_the_longest_and_the_shortest_sample(sliding: Family) -> None:
    """One long text among short ones is enough."""
    ids = torch.randint(0, 8, (5, 9), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([3, 2, 9, 1, 4])
    mask = (torch.arange(9) < lengths[:, None]).long()
    check_first_batch(sliding.adapter, {"input_ids": ids[:, :4], "attention_mask": mask[:, :4]})
    with pytest.raises(InputError, match=WINDOWED):
        check_first_batch(sliding.adapter, {"input_ids": ids, "attention_mask": mask})


def test_the_first_batch_of_every_task_is_looked_at_once(sliding: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short texts of the first task say nothing of the second one's; a second walk on the same samples asks nothing."""
    seen: list[int] = []

    def look(adapter: Adapter, batch: Batch) -> None:
        seen.append(batch["input_ids"].shape[1])

    monkeypatch.setattr("featcal.models.walk.check_first_batch", look)
    passes = {t: sliding.expert_pass(sliding.samples(t, "test", 4, 0), 2, Kept(2**24)) for t in TASKS}
    for _ in range(2):
        follow(sliding.run(), sliding.merged, passes)
    assert seen == [passes[task].batches[0]["input_ids"].shape[1] for task in TASKS]
