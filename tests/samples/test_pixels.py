"""Pixels are those of the model's own library: decoding and preparation against transformers on Pillow's pictures."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from open_clip_models import suite_as_open_clip
from PIL import Image, ImageOps
from tiny_clip import SIDE, clip_inputs

from featcal.calibration.calibrate import calibrate_family
from featcal.family.opening import open_family
from featcal.samples import prepare
from featcal.samples.records import read_image
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.schema import load_suite
from featcal.suite.source import Source
from featcal.system.errors import InputError

HEIGHT, WIDTH = 13, 17
RNG = np.random.default_rng(3)
COLOURS = RNG.integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
ALPHA = RNG.integers(0, 256, (HEIGHT, WIDTH, 1), dtype=np.uint8)
DEEP = RNG.integers(0, 65536, (HEIGHT, WIDTH), dtype=np.uint16)


def _saved(picture: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    content = io.BytesIO()
    picture.save(content, kind, **options)
    return content.getvalue()


def _rgb() -> Image.Image:
    return Image.fromarray(COLOURS)


def _rgba() -> Image.Image:
    return Image.fromarray(np.concatenate([COLOURS, ALPHA], axis=2))


def _turned(orientation: int, kind: str) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return _saved(_rgb(), kind, exif=exif)


def _sized(height: int, width: int) -> bytes:
    return _saved(Image.fromarray(RNG.integers(0, 256, (height, width, 3), dtype=np.uint8)))


TRANSPARENT: dict[str, Callable[[], bytes]] = {
    "RGBA": lambda: _saved(_rgba()),
    "RGBA in WebP": lambda: _saved(_rgba(), "WEBP", lossless=True, exact=True),
    "LA": lambda: _saved(_rgba().convert("LA")),
    "palette with one transparent entry": lambda: _saved(_rgb().convert("P"), transparency=7),
    "palette with an alpha for every entry": lambda: _saved(_rgb().quantize(16), transparency=bytes(range(0, 256, 16))),
    "GIF": lambda: _saved(_rgb().quantize(16), "GIF", transparency=3),
    "RGB with a transparent colour": lambda: _saved(_rgb(), transparency=tuple(map(int, COLOURS[2, 3]))),
    "RGBA turned": lambda: _saved(_rgba(), exif=_saved_exif(6)),
}
OPAQUE: dict[str, Callable[[], bytes]] = {
    **{f"EXIF {o} in {kind}": lambda o=o, kind=kind: _turned(o, kind) for o in range(1, 9) for kind in ("PNG", "JPEG")},
    "EXIF 6 in TIFF": lambda: _turned(6, "TIFF"),
    "CMYK": lambda: _saved(_rgb().convert("CMYK"), "JPEG"),
    "16 bits": lambda: _saved(Image.fromarray(DEEP)),
    "grey": lambda: _saved(_rgb().convert("L")),
    "one bit": lambda: _saved(_rgb().convert("1")),
    "palette": lambda: _saved(_rgb().convert("P")),
    **{
        f"{h} by {w}": lambda h=h, w=w: _sized(h, w)
        for h, w in [(1, 9), (3, 9), (9, 1), (9, 3), (1, 1), (3, 3), (4, 9)]
    },
}


def _saved_exif(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif.tobytes()


@pytest.fixture(scope="session")
def resizing(tiny_suite_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base whose image processor resizes and crops, as published ones do."""
    folder = tmp_path_factory.mktemp("resizing") / "base"
    shutil.copytree(tiny_suite_file.parent / "base", folder)
    file = folder / "preprocessor_config.json"
    size = {"do_resize": True, "do_center_crop": True, "size": {"shortest_edge": SIDE}, "default_to_square": False}
    file.write_text(json.dumps(json.loads(file.read_text()) | size))
    return folder


@pytest.mark.parametrize("made", [*TRANSPARENT.values(), *OPAQUE.values()], ids=[*TRANSPARENT, *OPAQUE])
def test_pixels_are_the_librarys_own(made: Callable[[], bytes], resizing: Path) -> None:
    """As `datasets` hands pictures out (upright, in the mode of the file) and the library's processor takes them."""
    from transformers import CLIPImageProcessor

    content = made()
    ours = clip_inputs(resizing).pixels([read_image(io.BytesIO(content), "picture")])
    with Image.open(io.BytesIO(content)) as picture:
        upright = ImageOps.exif_transpose(picture)
        expected = CLIPImageProcessor.from_pretrained(resizing)(images=upright, return_tensors="pt")["pixel_values"]
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("made", OPAQUE.values(), ids=OPAQUE)
def test_opaque_pictures_are_those_of_load_image(made: Callable[[], bytes], resizing: Path, tmp_path: Path) -> None:
    """`load_image` turns pictures upright too, but drops transparency, so that only opaque ones can be compared."""
    from transformers import CLIPImageProcessor
    from transformers.image_utils import load_image

    file = tmp_path / "picture"
    file.write_bytes(made())
    ours = clip_inputs(resizing).pixels([read_image(file, "picture")])
    processor = CLIPImageProcessor.from_pretrained(resizing)
    assert torch.equal(ours, processor(images=load_image(str(file)), return_tensors="pt")["pixel_values"])


def test_transparent_pixels_are_white() -> None:
    """By arithmetic: alpha c + (1 - alpha) 255, to half a grey level of rounding in Pillow."""
    ours = read_image(io.BytesIO(TRANSPARENT["RGBA"]()), "picture").astype(float)
    share = ALPHA / 255
    assert np.abs(ours - (share * COLOURS + (1 - share) * 255)).max() <= 1


def test_a_damaged_exif_block_does_not_make_a_picture_unreadable() -> None:
    """Pillow's own turning writes the block anew, which fails for values of another type than the tag's."""
    exif = Image.Exif()
    exif[0x0112], exif[0x0128] = 6, 2
    block = (
        exif.tobytes()
        .replace(b"\x01\x28\x00\x03", b"\x01\x28\x00\x02")
        .replace(b"\x28\x01\x03\x00", b"\x28\x01\x02\x00")
    )
    content = _saved(_rgb(), "JPEG", exif=block)
    assert read_image(io.BytesIO(content), "picture").shape == (WIDTH, HEIGHT, 3)


def test_another_backend_of_the_image_processor_is_refused(resizing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow and torchvision resize differently: what pixels are must not depend on what happens to be installed."""
    from transformers import CLIPImageProcessor, CLIPImageProcessorPil

    prepare._read_processor.cache_clear()
    monkeypatch.setattr(CLIPImageProcessor, "from_pretrained", CLIPImageProcessorPil.from_pretrained)
    with pytest.raises(InputError, match=r"backend 'pil'.*'torchvision'"):
        clip_inputs(resizing).pixels([COLOURS])
    prepare._read_processor.cache_clear()


def test_a_changed_image_processor_is_read_again(resizing: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(resizing, tmp_path / "base")
    before = clip_inputs(folder).pixels([COLOURS])
    file = folder / "preprocessor_config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"image_std": [std / 2 for std in content["image_std"]]}))
    torch.testing.assert_close(clip_inputs(folder).pixels([COLOURS]), 2 * before)


def test_pixels_of_the_embedded_suite_stay() -> None:
    """Sum and sum of squares of the first calibration pictures: every calibrated tensor of clip-mini hangs on them."""
    family = open_family(load_suite("clip-mini"), device="cpu")
    pixels = family.samples("digits", "calibration", 8, 42).inputs["pixel_values"].double()
    assert pixels.shape == (8, 3, 32, 32)
    assert [float(pixels.sum()), float(pixels.square().sum())] == pytest.approx(
        [22876.86314911302, 42983.72268249958], rel=1e-9
    )


def test_a_run_records_what_made_its_inputs(tiny_suite_file: Path) -> None:
    record = calibrate_family(load_suite(tiny_suite_file), CalibrationConfig(samples=4), device="cpu").record
    assert {"torchvision", "pillow", "open_clip_torch", "tokenizers"} <= set(record["versions"])
    assert record["preparation"] == {}  # the tiny suite's sources are tensors


def test_what_makes_pictures_and_texts_is_recorded_by_library(tiny_suite_file: Path, tmp_path: Path) -> None:
    def of(name: str | Path) -> dict[str, str]:
        suite = load_suite(name)
        if Path(name).suffix:  # its samples are tensors
            drawn = suite.task("pets").model_copy(update={"calibration": Source(embedded="digits")})
            suite = suite.model_copy(update={"tasks": {"pets": drawn}})
        return replace(open_family(load_suite(name), "cpu"), suite=suite).preparation()

    torchvision = "transformers.models.clip.image_processing_clip.CLIPImageProcessor"
    assert of("clip-mini") == of(tiny_suite_file) == {"pictures": torchvision, "backend": "torchvision"}
    as_open_clip = suite_as_open_clip(tiny_suite_file, tmp_path / "oc")
    assert of(as_open_clip) == {"pictures": "open_clip.transform.image_transform_v2", "backend": "pil"}
    text = of("t5-mini")
    assert set(text) == {"text"}
    assert text["text"].startswith("transformers.")
