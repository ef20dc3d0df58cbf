"""Blocks that the library calls with masks of their own: each gets its own, and a stage that forgets them stops every
run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from featcal import InputError, measure_drift
from featcal.calibration.calibrate import calibrate_to_folder, config_for
from featcal.drift.decomposition import measure_total_drift
from featcal.family.opening import Family
from featcal.models.adapter import Adapter, Batch, capture_call
from featcal.models.families.decoder import DecoderStage
from featcal.models.families.registry import FACTS
from featcal.models.features import final_features
from featcal.models.lane import WalkCache
from featcal.models.replay import check_first_batch
from featcal.testing.trial import TASKS, Trial, write_trial

FORGOTTEN = r"block 1: transformers calls this block with other arguments"


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    """A language model whose blocks after the first one look back 4 tokens."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    options: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 32, "num_hidden_layers": 3}
    options |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    options |= {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    facts = next(one for one in FACTS if one.model_type == "qwen2")
    return write_trial(Qwen2ForCausalLM(Qwen2Config(**options)), facts, tmp_path)


@pytest.fixture
def sliding(trial: Trial) -> Family:
    return trial.family


@pytest.fixture
def forgetful(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> Family:
    """The same with a stage that takes the first block's call for all; opened past the check of its probe."""

    def first_call(self: Any, outer: Any, inputs: Batch, upstream: Any) -> Any:
        own = {"embed_tokens.weight": outer["model.embed_tokens.weight"]}
        asked = {"attention_mask": inputs.get("attention_mask"), "use_cache": False}
        return capture_call(self._stack, self.blocks[0].module, own, input_ids=inputs["input_ids"], **asked)

    monkeypatch.setattr(DecoderStage, "first_call", first_call)
    monkeypatch.setattr("featcal.family.opening.check_replay", lambda *_: None)
    return trial.family


def test_every_block_has_its_own_mask(sliding: Family) -> None:
    """Blocks 1 and 2 share one object, and only what differs from the first block is held apart."""
    (stage,) = sliding.adapter.stages
    batch = sliding.samples(TASKS[0], "test", 4, 0).inputs
    call = stage.first_call(sliding.base.read(stage.outer), batch, None)
    assert call.apart.keys() == {"model.layers.1", "model.layers.2"}
    masks = [call.block_call(block.name).kwargs["attention_mask"] for block in stage.blocks]
    assert masks[1] is masks[2]
    tokens = batch["input_ids"].shape[1]
    far = torch.arange(tokens)[:, None] - torch.arange(tokens) >= 4
    assert not bool((masks[1] & far).any())
    assert bool((masks[0] & far).any())


def test_calls_apart_survive_files(sliding: Family) -> None:
    """What blocks share is in the file once."""
    from featcal.models.activations import ActivationStore

    (stage,) = sliding.adapter.stages
    call = stage.first_call(sliding.base.read(stage.outer), sliding.samples(TASKS[0], "test", 4, 0).inputs, None)
    back = ActivationStore(0).hold([call])[0]
    for block in stage.blocks:
        mine, theirs = call.block_call(block.name), back.block_call(block.name)
        assert mine.hidden_state.equal(theirs.hidden_state)
        assert mine.kwargs["attention_mask"].equal(theirs.kwargs["attention_mask"])
    assert (
        back.block_call("model.layers.1").kwargs["attention_mask"]
        is back.block_call("model.layers.2").kwargs["attention_mask"]
    )


def test_a_forgotten_mask_stops_every_run(forgetful: Family, tmp_path: Path) -> None:
    """The block is named, and nothing is left where the model was to be written."""
    with pytest.raises(InputError, match=FORGOTTEN):
        measure_drift(forgetful)
    with pytest.raises(InputError, match=FORGOTTEN):
        calibrate_to_folder(forgetful, config_for(forgetful), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    batch = forgetful.samples(TASKS[0], "test", 4, 0).inputs
    with pytest.raises(InputError, match=FORGOTTEN):
        final_features(forgetful.adapter, forgetful.base, {}, [batch], forgetful.compute)


def test_a_window_that_no_text_reaches_is_no_matter(forgetful: Family) -> None:
    """The masks of all blocks hold the same values then, and the states are the library's own."""
    short = {name: tensor[:, :3] for name, tensor in forgetful.samples(TASKS[0], "test", 4, 0).inputs.items()}
    check_first_batch(forgetful.adapter, short)
    ids, mask = short["input_ids"], short["attention_mask"]
    ours = final_features(forgetful.adapter, forgetful.base, {}, [{"input_ids": ids, "attention_mask": mask}],
                          forgetful.compute)  # fmt: skip
    library = forgetful.adapter.whole(forgetful.base.read(forgetful.adapter.tower), forgetful.base_folder)
    states = library.model(ids, attention_mask=mask).last_hidden_state
    rows = torch.arange(len(ids))
    torch.testing.assert_close(ours, states[rows, mask.sum(1) - 1], rtol=1e-5, atol=1e-5)


def test_the_check_is_of_the_longest_and_the_shortest_sample(forgetful: Family) -> None:
    """One long text among short ones is enough."""
    ids = torch.randint(0, 8, (5, 9), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([3, 2, 9, 1, 4])
    mask = (torch.arange(9) < lengths[:, None]).long()
    check_first_batch(forgetful.adapter, {"input_ids": ids[:, :4], "attention_mask": mask[:, :4]})
    with pytest.raises(InputError, match=FORGOTTEN):
        check_first_batch(forgetful.adapter, {"input_ids": ids, "attention_mask": mask})


def test_the_first_batch_of_every_task_is_looked_at_once(sliding: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short texts of the first task say nothing of the second one's; a second walk on the same samples asks nothing."""
    seen: list[int] = []

    def look(adapter: Adapter, batch: Batch) -> None:
        seen.append(batch["input_ids"].shape[1])

    monkeypatch.setattr("featcal.models.walk.check_first_batch", look)
    passes = {t: sliding.expert_pass(sliding.samples(t, "test", 4, 0), 2, WalkCache(2**24)) for t in TASKS}
    for _ in range(2):
        measure_total_drift(sliding.run(), sliding.merged, passes)
    assert seen == [passes[task].batches[0]["input_ids"].shape[1] for task in TASKS]
