"""The same input is the same bytes: every file and every commit of the Hub that is read tells a suite from others."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
import yaml
from fake_hub import put_in_cache, referring
from huggingface_hub import constants
from open_clip_models import suite_as_open_clip
from opened_files import below, opened_files
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_clip import TASKS, write_suite
from tiny_encoders import ROWS, tiny_encoder, write_tokenizer
from tiny_text import text_suite, write_text_suite
from tiny_vision_language import ROWS as PICTURED
from tiny_vision_language import write_pictured

from featcal.family.opening import open_family
from featcal.server.orders import order
from featcal.session.fingerprint import model_stamp, suite_stamp
from featcal.session.session import Session, open_session
from featcal.studies.history import suite_hash
from featcal.studies.recording import hash_of
from featcal.suite.schema import Suite, load_suite
from featcal.suite.views import DriftOptions, EvaluationSamples
from featcal.system.errors import InputError, NoScores
from featcal.system.resources import data_path, embedded_suites
from featcal.testing.trial import write_trial

Edit = Callable[[Callable[[dict[str, Any]], None]], Path]


def write_sentences(root: Path, pooling: str = "mean") -> Path:
    """A suite of sentence-transformers."""
    trial = write_trial(tiny_encoder(ROWS["bert"]), ROWS["bert"], root)
    modules = {"": "Transformer", "1_Pooling": "Pooling"}
    listed = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in modules.items()]
    content = yaml.safe_load((root / "suite.yaml").read_text())
    folders = [root / content["base"], *(root / task["expert"] for task in content["tasks"].values())]
    for folder in folders:
        transformers.BertModel.from_pretrained(folder).save_pretrained(folder)
        (folder / "modules.json").write_text(json.dumps(listed))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": pooling}))
    write_tokenizer(root / "base")
    (root / "texts.jsonl").write_text("".join(json.dumps({"a": word}) + "\n" for word in ("a cat", "the dog ran")))
    for task in content["tasks"].values():
        task |= {split: {"jsonl": "texts.jsonl", "input": "{a}"} for split in ("calibration", "test")}
        task.pop("classes", None)
    content["merged"] = {"method": "task-arithmetic", "scale": 0.5}
    (root / "suite.yaml").write_text(yaml.safe_dump(content))
    assert trial.root == root
    return root / "suite.yaml"


def write_pictures(root: Path, kind: str = "parquet") -> Path:
    """The suite of tiny CLIPs on pictures in files that a table names."""
    import pandas as pd

    content = yaml.safe_load(write_suite(root).read_text())
    drawn = np.random.default_rng(0).integers(0, 255, (6, 12, 12, 3), dtype=np.uint8)
    for number, picture in enumerate(drawn):
        Image.fromarray(picture).save(root / f"p{number}.png")
    names = [f"p{number}.png" for number in range(6)]
    cells = names if kind == "parquet" else [{"bytes": None, "path": name} for name in names]
    pd.DataFrame({"image": cells, "label": [0, 1, 2] * 2}).to_parquet(root / "rows.parquet")
    for task in content["tasks"].values():
        task |= {split: {"parquet": "rows.parquet"} for split in ("calibration", "validation", "test")}
    (root / "suite.yaml").write_text(yaml.safe_dump(content))
    return root / "suite.yaml"


SUITES: dict[str, Callable[[Path], Path]] = {
    "tiny clip": write_suite,
    "pictures that Parquet names": write_pictures,
    "sentence-transformers": write_sentences,
    "open_clip": lambda root: suite_as_open_clip(write_suite(root / "clip"), root / "open_clip"),
    "tiny t5 with LoRA": lambda root: write_text_suite(root, "t5-lora"),
    "tiny texts": lambda root: text_suite(root, "llama"),
    "texts with pictures": lambda root: write_pictured(PICTURED["qwen2_5_vl"], root).root / "suite.yaml",
    **{name: lambda root, file=file: file for name, file in embedded_suites().items()},  # type: ignore[misc]
}
QUICK = ("tiny clip", "sentence-transformers")


def measure(session: Session, model: str = "merged") -> None:
    """Measure drift and, where there can be any, scores."""
    session.measure.drift(model, DriftOptions(2, "calibration"))
    with suppress(NoScores):
        session.measure.scores(model, EvaluationSamples(2, "test"))


@pytest.mark.parametrize("name", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in SUITES])
def test_every_file_that_is_opened_is_in_the_stamp(tmp_path: Path, name: str) -> None:
    suite = load_suite(SUITES[name](tmp_path / "suite"))
    stamped = {os.path.realpath(file) for file, *_ in suite_stamp(suite).files}
    with opened_files() as opened:
        measure(Session(open_family(suite, "cpu")))
    own = {os.path.realpath(data_path("clip-mini", "glyphs.npz"))}  # of the drawing in featcal, not of a suite
    found = below(suite.root, opened) - own
    assert len(found) >= 3
    assert found <= stamped


def test_the_heads_of_a_written_model_are_in_its_stamp(tiny_suite: Suite, tmp_path: Path) -> None:
    session, out, on = Session(open_family(tiny_suite, "cpu")), tmp_path / "out", EvaluationSamples(None, "test")
    session.fit.baseline("react:samples=4").save(out)
    before = model_stamp(str(out), Path.cwd())
    with opened_files() as opened:
        shown = session.measure.scores(str(out), on).average
    assert {Path(file).parent.name for file in below(out, opened)} == {"out", "heads"}
    assert below(out, opened) <= {os.path.realpath(one[0]) for one in before}
    for head in (out / "heads").iterdir():
        save_file({name: -tensor for name, tensor in load_file(head).items()}, head, {"format": "pt"})
    true = Session(session.family).measure.scores(str(out), on).average
    assert session.measure.scores(str(out), on).average == true != shown


def keys(file: Path) -> tuple[Any, str, str]:
    """What sessions, history and jobs tell a suite by."""
    suite = load_suite(file)
    return suite_stamp(suite), suite_hash(suite), order("scores", str(file), {"model": "merged"}).key


def require_others(before: tuple[Any, str, str], after: tuple[Any, str, str]) -> None:
    assert [one == other for one, other in zip(before, after, strict=True)] == [False] * 3


def test_a_module_below_a_models_folder_that_changes_is_another_suite(tmp_path: Path) -> None:
    file = write_sentences(tmp_path)
    before = keys(file)
    (tmp_path / "base" / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "cls"}))
    require_others(before, keys(file))


@pytest.mark.parametrize("kind", ["parquet", "parquet of bytes and paths"])
def test_a_picture_that_a_table_names_and_that_changes_is_another_suite(tmp_path: Path, kind: str) -> None:
    file = write_pictures(tmp_path, kind)
    before = keys(file)
    with (tmp_path / "p3.png").open("ab") as picture:
        picture.write(b" ")
    require_others(before, keys(file))


def test_pictures_whose_bytes_are_in_the_table_are_not_looked_for(tmp_path: Path) -> None:
    import pandas as pd

    file = write_pictures(tmp_path)
    cells = [{"bytes": (tmp_path / f"p{n}.png").read_bytes(), "path": f"p{n}.png"} for n in range(6)]
    pd.DataFrame({"image": cells, "label": [0, 1, 2] * 2}).to_parquet(tmp_path / "rows.parquet")
    assert not [one for one, *_ in suite_stamp(load_suite(file)).files if one.endswith(".png")]


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def publish(cache: Path, folder: Path, commit: str) -> None:
    """Publish a model as `me/expert`, and fetch it."""
    shutil.copytree(folder, cache / "models--me--expert" / "snapshots" / commit)
    (cache / "models--me--expert" / "refs" / "main").write_text(commit)


def test_a_model_on_the_hub_counts_by_its_commit(edit_suite: Edit, hub_cache: Path) -> None:
    file = edit_suite(referring(**{TASKS[0]: "me/expert"}))
    root, on = file.parent, DriftOptions(4, "calibration")
    not_fetched = keys(file)
    assert not_fetched[0].commits == ()
    put_in_cache(hub_cache, "me/expert", root / "experts" / TASKS[0])
    before, opened = keys(file), open_session(file)
    assert before[0].commits == (("me/expert", "a" * 40),)
    require_others(not_fetched, before)
    shown = opened.measure.drift("merged", on)
    publish(hub_cache, root / "experts" / TASKS[1], "b" * 40)
    require_others(before, keys(file))
    assert hash_of(opened) == before[1]  # of the commit that it reads
    now = open_session(file)
    assert now is not opened
    assert hash_of(now) == keys(file)[1]
    true = Session(open_family(load_suite(file))).measure.drift("merged", on)
    last = [one.tasks[TASKS[0]].layers[-1].relative_drift for one in (shown, now.measure.drift("merged", on), true)]
    assert last[0] != last[1] == last[2]
    assert model_stamp(f"base+me/expert@{'c' * 40}", root)[-1] == (f"me/expert@{'c' * 40}", "c" * 40)


def test_a_session_that_fetches_is_the_one_of_the_commit(
    edit_suite: Edit, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked for before anything is in the cache, and found again afterwards."""
    from featcal.session import session as sessions

    file, real = edit_suite(referring(**{TASKS[0]: "me/expert"})), sessions.open_family

    def fetch_first(*given: Any) -> Any:
        put_in_cache(hub_cache, "me/expert", file.parent / "experts" / TASKS[0])
        return real(*given)

    monkeypatch.setattr(sessions, "open_family", fetch_first)
    opened = open_session(file)
    monkeypatch.undo()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub_cache))
    assert open_session(file) is opened


def test_a_data_set_on_the_hub_counts_by_its_commit(edit_suite: Edit, hub_cache: Path) -> None:
    def on_hub(content: dict[str, Any]) -> None:
        content["tasks"][TASKS[0]]["test"] = {"hub": "me/rows", "split": "test"}

    file = edit_suite(on_hub)
    refs = hub_cache / "datasets--me--rows" / "refs"
    refs.mkdir(parents=True)
    seen = [keys(file)]
    for commit in ("a" * 40, "b" * 40):
        (refs / "main").write_text(commit)
        seen.append(keys(file))
        require_others(*seen[-2:])
    assert seen[-1][0].data == (("me/rows", "b" * 40),)


def test_a_reference_that_names_nothing_has_no_stamp_and_no_error(tmp_path: Path, hub_cache: Path) -> None:
    (tmp_path / "here").mkdir()
    for reference in ("me/expert", "me/expert@v1", "here/expert", "a+b+c", "hf-hub:me/x", "x" * 300, "a\0b", "me/../x"):
        assert model_stamp(reference, tmp_path) == ()
    with pytest.raises(InputError):
        open_family(load_suite(write_suite(tmp_path)).model_copy(update={"base": "here/expert"}), "cpu")
