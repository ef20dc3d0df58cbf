"""Data sets on a Hub that is played here: what is fetched for a split, and what is said where it cannot be."""

from __future__ import annotations

import io
import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub.server import serve
from huggingface_hub import constants
from PIL import Image as Pillow

from featcal.samples import hub
from featcal.samples.hub import read_hub
from featcal.samples.hub_repository import known_repository
from featcal.system.errors import InputError

datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.filterwarnings("ignore")

CLASSES = ["cat", "dog", "owl"]
FEATURES = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=CLASSES)})
CARD = """---
dataset_info:
  features:
  - {name: image, dtype: image}
  - name: label
    dtype: {class_label: {names: {'0': cat, '1': dog, '2': owl}}}
  splits:
  - {name: train, num_bytes: 30000, num_examples: 24}
  - {name: test, num_bytes: 8000, num_examples: 6}
configs:
- config_name: default
  data_files:
  - {split: train, path: data/train-*}
  - {split: test, path: data/test-*}
---
"""


def picture(number: int) -> dict[str, Any]:
    """A picture of noise, so that every one has as many bytes as another."""
    stream = io.BytesIO()
    noise = np.random.default_rng(number).integers(0, 255, (16, 16, 3), dtype=np.uint8)
    Pillow.fromarray(noise).save(stream, "png")
    return {"bytes": stream.getvalue(), "path": None}


def write_pictures(file: Path, rows: range, described: bool = True, group: int = 2) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {"image": [picture(one) for one in rows], "label": [one % len(CLASSES) for one in rows]}
    table = pa.table(content, schema=FEATURES.arrow_schema if described else None)
    pq.write_table(table, file, row_group_size=group)


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repositories")
    for name, card in (("me/pictures", CARD), ("me/bare", "")):
        top = root / "datasets" / name / "main"
        for split, rows in (("train", range(24)), ("test", range(24, 30)), ("contrast", range(30, 60))):
            if split != "contrast" or not card:
                for shard in range(2):
                    half = len(rows) // 2
                    part = rows[shard * half : (shard + 1) * half]
                    write_pictures(top / "data" / f"{split}-{shard:05}-of-00002.parquet", part, described=not card)
        if card:
            (top / "README.md").write_text(card)
    lines = root / "datasets" / "me" / "lines" / "main"
    lines.mkdir(parents=True)
    for split in ("train", "test"):
        (lines / f"{split}.jsonl").write_text(json.dumps({"text": split}) + "\n")
    scripted = root / "datasets" / "me" / "scripted" / "main"
    scripted.mkdir(parents=True)
    (scripted / "scripted.py").write_text("")
    return root


@pytest.fixture(scope="module")
def address(repositories: Path) -> Iterator[str]:
    server = serve(repositories)
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


Log = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def log(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Log:
    """Play a Hub, with empty caches, and return what gives the requests since it was called last."""
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_XET_CACHE", str(tmp_path / "xet"))
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", address)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", False)
    monkeypatch.setattr(datasets.config, "USE_PARQUET_EXPORT", False)  # of another host
    # Clients wait a second or more between tries.
    sleep = time.sleep
    monkeypatch.setattr("time.sleep", lambda seconds: sleep(seconds) if seconds < 1 else None)
    huggingface_hub.HfFileSystem.clear_instance_cache()
    forget()
    huggingface_hub.utils.disable_progress_bars()
    datasets.disable_progress_bars()
    huggingface_hub.close_session()

    def requests() -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"{address}/_hub/log") as answer:
            found: list[dict[str, Any]] = json.load(answer)
        urllib.request.urlopen(urllib.request.Request(f"{address}/_hub/log", method="DELETE")).close()
        return found

    requests()
    return requests


def forget() -> None:
    """Forget what this process has opened, as another one would not know it."""
    hub._open.cache_clear()


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()


def fetched(requests: list[dict[str, Any]]) -> set[str]:
    """Return the files of data of which content was sent."""
    names = {one["path"].partition("?")[0].rpartition("/")[2] for one in requests if one["bytes"] > 0}
    return {name for name in names if name.endswith((".parquet", ".jsonl", ".tar"))}


def read(name: str, split: str, tmp_path: Path, **options: Any) -> Any:
    return read_hub(name, tmp_path, options.get("config"), split, options.get("revision"))


@pytest.mark.parametrize("name", ["me/pictures", "me/bare"])
def test_a_split_alone_is_fetched_and_is_that_of_the_whole(
    name: str, log: Log, tmp_path: Path, monkeypatch: Any
) -> None:
    found = read(name, "test", tmp_path)
    assert fetched(log()) == {f"test-0000{shard}-of-00002.parquet" for shard in range(2)}
    assert found.class_names("label") == tuple(CLASSES)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "other")
    whole = datasets.load_dataset(name, split="test").with_format("arrow")[:]
    assert found.schema.equals(whole.schema, check_metadata=True)
    assert found.rows(range(6), ["image", "label"]) == whole.to_pylist()


def test_a_second_time_nothing_is_fetched_and_offline_nothing_is_asked(
    log: Log, tmp_path: Path, monkeypatch: Any
) -> None:
    first = read("me/pictures", "train", tmp_path).rows(range(24), ["image", "label"])
    known = known_repository("me/pictures", None)
    assert known is not None
    log()
    forget()
    assert read("me/pictures", "train", tmp_path).rows(range(24), ["image", "label"]) == first
    assert [one["path"].partition("?")[0] for one in log()] == ["/api/datasets/me/pictures"]
    assert read("me/pictures", "train", tmp_path, revision=known.commit).rows(range(24), ["image", "label"]) == first
    forget()
    go_offline(monkeypatch)
    assert read("me/pictures", "train", tmp_path).rows(range(24), ["image", "label"]) == first
    assert log() == []
    with pytest.raises(
        InputError, match="'me/pictures' cannot be fetched: the Hub is not asked, since HF_HUB_OFFLINE is set"
    ):
        read("me/pictures", "test", tmp_path)


def test_data_that_is_prepared_whole_is_not_fetched_again(log: Log, tmp_path: Path, monkeypatch: Any) -> None:
    whole = datasets.load_dataset("me/pictures", split="test").with_format("arrow")[:].to_pylist()
    log()
    assert read("me/pictures", "test", tmp_path).rows(range(6), ["image", "label"]) == whole
    assert not fetched(log())
    forget()
    go_offline(monkeypatch)
    assert read("me/pictures", "test", tmp_path).rows(range(6), ["image", "label"]) == whole


def test_lines_whose_types_no_card_says_are_fetched_with_all_splits(log: Log, tmp_path: Path) -> None:
    assert read("me/lines", "test", tmp_path).column("text") == ["test"]
    assert fetched(log()) == {"train.jsonl", "test.jsonl"}


def test_an_expression_of_splits(log: Log, tmp_path: Path) -> None:
    found = read("me/bare", "test[:2]+train[-1:]", tmp_path).column("label")
    assert found == [0, 1, 2]
    assert not any("contrast" in name for name in fetched(log()))


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        (
            "me/pictures",
            {"split": "trian"},
            r"has no split 'trian' \(splits: 'train', 'test'\). Did you mean 'train'\?",
        ),
        ("me/pictures", {"config": "plain"}, r"has no configuration 'plain' \(configurations: 'default'\)"),
        ("me/scripted", {}, r"is read by a script of its own \(scripted.py\), which `datasets` does not run any more"),
        ("me/none", {}, r"^the Hub has no data set 'me/none'"),
        ("me/pictures", {"revision": "v9"}, r"'me/pictures' has no revision 'v9' on the Hub"),
    ],
)
def test_what_cannot_be_read_is_said_before_it_is_fetched(
    name: str, options: dict[str, str], said: str, log: Log, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=said):
        read(name, **{"split": "test", **options}, tmp_path=tmp_path)
    assert not fetched(log())


def test_a_broken_connection_is_one_sentence_and_what_is_whole_is_kept(log: Log, address: str, tmp_path: Path) -> None:
    fault = {"match": "GET .*train-00001", "status": 503}
    request = urllib.request.Request(f"{address}/_hub/faults", data=json.dumps([fault]).encode(), method="POST")
    urllib.request.urlopen(request).close()
    try:
        with pytest.raises(InputError, match="'me/pictures' cannot be fetched: the Hub has trouble of its own"):
            read("me/pictures", "train", tmp_path)
    finally:
        urllib.request.urlopen(urllib.request.Request(f"{address}/_hub/faults", method="DELETE")).close()
    log()
    assert len(read("me/pictures", "train", tmp_path)) == 24
    assert fetched(log()) == {"train-00001-of-00002.parquet"}
