"""Vision transformers in timm's folders: what must hold for any architecture, and how timm's own pictures look."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from lanes import rows
from PIL import Image
from safetensors.torch import load_file
from timm.data import create_transform
from tiny_timm import PIXELS, tiny_timm
from torchvision.transforms.v2 import functional as pictures

from featcal import InputError, calibrate, evaluate
from featcal.formats.processor import timm_settings
from featcal.models.families.timm_vit import TimmVit
from featcal.samples.prepare import Preparation
from featcal.testing.checks import CHECKS
from featcal.testing.trial import TASKS, Trial, write_trial


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    return write_trial(tiny_timm(), TimmVit.facts, tmp_path_factory.mktemp("timm"))


@pytest.mark.parametrize("name", rows(CHECKS, quick=("replay", "paper", "repair"), slow=CHECKS))
def test_what_must_hold(trial: Trial, name: str) -> None:
    assert CHECKS[name](trial)


def test_what_is_written_is_a_folder_of_timm(trial: Trial, tmp_path: Path) -> None:
    """timm loads it strictly, with the classes of the folder that it was made of."""
    done = calibrate(trial.family, trial.config())
    done.save(tmp_path / "out")
    model = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    inputs = trial.padded_inputs(TASKS[0])
    with torch.no_grad():
        theirs = model(inputs["pixel_values"])
    torch.testing.assert_close(trial.compute_scores(trial.family.model(str(tmp_path / "out")), inputs), theirs)
    head = load_file(trial.root / "merged" / "model.safetensors")["head.weight"]
    assert model.get_parameter("head.weight").equal(head)


def test_models_are_compared_by_what_timm_builds() -> None:
    """One file names arguments that another leaves to its architecture; timm saves the number of classes among them."""

    def settings(**arguments: Any) -> dict[str, Any]:
        config = {"architecture": "vit_tiny_patch16_224", "num_classes": 3, "model_args": arguments}
        return TimmVit(config, [], torch.device("cpu")).settings

    plain = settings()
    assert settings(num_classes=3, in_chans=3, global_pool="token", img_size=[224, 224], drop_path_rate=0.1) == plain
    for other in ({"act_layer": "relu"}, {"qk_norm": True}, {"img_size": 32}, {"num_heads": 4}, {"pre_norm": True}):
        assert settings(**other) != plain


def test_every_task_is_scored_by_its_experts_head(trial: Trial) -> None:
    score = evaluate(trial.family, "expert:left", split="test").tasks["left"]
    with torch.no_grad():
        theirs = trial.scores(trial.library("experts/left", torch.float32), trial.padded_inputs("left", "test"))
    assert score.predictions.equal(theirs.argmax(1))


def test_pictures_are_prepared_as_timm_says(tmp_path: Path) -> None:
    """Pixel by pixel as torchvision does it, and as timm's own transform but for Pillow's rounding."""
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "a", "pretrained_cfg": PIXELS}))
    picture = np.random.default_rng(0).integers(0, 256, (13, 17, 3), dtype=np.uint8)
    ours = Preparation(tmp_path, "pixels").pixels([picture])[0]
    resized = pictures.resize(torch.from_numpy(picture).movedim(2, 0), [8], pictures.InterpolationMode.BICUBIC)
    assert timm_settings(tmp_path) == {
        "size": {"shortest_edge": 8},
        "crop_size": {"height": 8, "width": 8},
        "resample": 3,
        "image_mean": [0.5] * 3,
        "image_std": [0.25] * 3,
    }
    expected = (pictures.center_crop(resized, [8, 8]) / 255 - 0.5) / 0.25
    torch.testing.assert_close(ours, expected)
    transform = create_transform(
        input_size=(3, 8, 8), crop_pct=0.9, interpolation="bicubic", mean=(0.5,) * 3, std=(0.25,) * 3
    )
    assert float((ours - transform(Image.fromarray(picture))).abs().max()) < 3 / 255 / 0.25


@pytest.mark.parametrize("said", [{"crop_mode": "squash"}, {"interpolation": "random"}, {"input_size": [3, 8, 9]}])
def test_pictures_that_are_cut_otherwise_are_refused(said: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "a", "pretrained_cfg": PIXELS | said}))
    with pytest.raises(InputError, match="featcal prepares squares from the center, by nearest, bilinear, bicubic"):
        Preparation(tmp_path, "pixels").pixels([np.zeros((9, 9, 3), dtype=np.uint8)])
