"""Data sets on a Hub that is played here: what is fetched for a split, and what is said where it cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest
from hub_data_sets import CLASSES, Log, fetched, forget, go_offline, play, send, serving, write_pictures
from suite_edits import Edit

from featcal.samples import hub_rows
from featcal.samples.hub import read_hub
from featcal.samples.hub_repository import Repository, known_repository
from featcal.samples.sources import preview_samples
from featcal.session.fingerprint import suite_stamp
from featcal.suite.schema import Suite, load_suite
from featcal.system.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from serving(tmp_path_factory.mktemp("repositories"))


@pytest.fixture
def log(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Log:
    return play(address, tmp_path, monkeypatch)


def read(name: str, split: str, tmp_path: Path, **options: Any) -> Any:
    return read_hub(name, tmp_path, options.get("config"), split, options.get("revision"))


@pytest.mark.parametrize("name", ["me/pictures", "me/bare"])
def test_a_split_alone_is_fetched_and_is_that_of_the_whole(
    name: str, log: Log, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    datasets.enable_progress_bars()
    found = read(name, "test", tmp_path)
    assert capsys.readouterr().err == ""  # no bars of `datasets`, nor of what takes less than a moment
    assert not datasets.are_progress_bars_disabled()
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


def test_how_a_repository_is_laid_out_is_found_out_once(log: Log, tmp_path: Path, monkeypatch: Any) -> None:
    made: list[str] = []
    load = datasets.load_dataset_builder
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *a, **given: made.append(a[0]) or load(*a, **given))
    Repository.lay_out.cache_clear()
    for split in ("train", "test"):
        read("me/pictures", split, tmp_path)
    assert len(made) == 1


def test_data_that_is_prepared_whole_is_not_fetched_again(log: Log, tmp_path: Path, monkeypatch: Any) -> None:
    whole = datasets.load_dataset("me/pictures", split="test").with_format("arrow")[:].to_pylist()
    log()
    with monkeypatch.context() as offline:
        go_offline(offline)
        assert read("me/pictures", "test", tmp_path).rows(range(6), ["image", "label"]) == whole
    huggingface_hub.close_session()
    forget()
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
    send(address, "faults", "POST", [{"match": "GET .*train-00001", "status": 503}])
    with pytest.raises(InputError, match="'me/pictures' cannot be fetched: the Hub fails with"):
        read("me/pictures", "train", tmp_path)
    send(address, "faults", "DELETE")
    log()
    assert len(read("me/pictures", "train", tmp_path)) == 24
    assert fetched(log()) == {"train-00001-of-00002.parquet"}


@pytest.fixture
def rows_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let row groups be fetched of splits that are as small as those here."""
    monkeypatch.setattr(hub_rows, "WORTH", 0)
    monkeypatch.setattr(hub_rows, "_TAIL", 100)  # less than a footer


def seen(suite: Suite, count: int, seed: int) -> tuple[Any, ...]:
    """Look at a draw: its places, labels, names of classes and pixels."""
    drawn = preview_samples(suite, "pets", "test", count, seed)
    assert drawn.labels is not None
    assert drawn.images is not None
    return drawn.indices, drawn.labels.tolist(), drawn.class_names, [one.tolist() for one in drawn.images]


def suite_on(edit_suite: Edit, **source: Any) -> Suite:
    return load_suite(edit_suite(lambda content: content["tasks"]["pets"].update(test=source)))


@pytest.mark.parametrize("name", ["me/pictures", "me/bare"])
def test_row_groups_alone_give_the_samples_of_the_whole(
    name: str, log: Log, edit_suite: Edit, rows_pay: None, tmp_path: Path, monkeypatch: Any
) -> None:
    suite = suite_on(edit_suite, hub=name, split="train")
    found = {seed: seen(suite, 3, seed) for seed in (1, 2)}
    ranges = [one for one in log() if fetched([one])]
    assert all(one["range"] for one in ranges)
    assert len(ranges) > 2
    rows = read(name, "train", tmp_path).read(1, ["image", "label"])
    sent = sum(one["bytes"] for one in ranges)
    forget()
    monkeypatch.setattr(hub_rows, "WORTH", 1 << 40)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "other")
    assert found == {seed: seen(suite, 3, seed) for seed in (1, 2)}
    assert rows.schema.equals(read(name, "train", tmp_path).schema, check_metadata=True)
    assert rows.to_pylist() == read(name, "train", tmp_path).rows([2, 3], ["image", "label"])
    assert sent < sum(one["bytes"] for one in log() if fetched([one])) * 0.75


def test_row_groups_are_fetched_once_and_read_offline(
    log: Log, edit_suite: Edit, rows_pay: None, monkeypatch: Any
) -> None:
    suite = suite_on(edit_suite, hub="me/bare", split="train")
    first = seen(suite, 3, 1)
    log()
    forget()
    assert seen(suite, 3, 1) == first
    assert [one["path"].partition("?")[0] for one in log()] == ["/api/datasets/me/bare"]
    forget()
    go_offline(monkeypatch)
    assert seen(suite, 3, 1) == first
    assert log() == []
    with pytest.raises(InputError, match=r"task 'pets', test samples: 'me/bare@.*HF_HUB_OFFLINE is set"):
        seen(suite, 5, 3)


def test_a_draw_of_most_rows_takes_the_split_whole(log: Log, edit_suite: Edit, rows_pay: None) -> None:
    suite = suite_on(edit_suite, hub="me/bare", split="train")
    seen(suite, 2, 1)
    log()
    whole = seen(suite, 20, 1)
    requests = log()
    assert len(whole[0]) == 20
    assert not any(one["range"] for one in requests if fetched([one]))
    assert len(fetched(requests)) == 2
    forget()
    assert seen(suite, 20, 1) == whole
    assert not fetched(log())


def test_labels_that_are_words_are_counted_over_the_whole_split(log: Log, edit_suite: Edit, rows_pay: None) -> None:
    suite = suite_on(edit_suite, hub="me/words", split="test")
    *_, names, _ = seen(suite, 1, 1)
    assert names == ("cat", "dog", "fish")
    asked = [one for one in log() if fetched([one])]
    assert {bool(one["range"]) for one in asked} == {True, False}  # the footer, and then all of it
    forget()
    assert read("me/words", "test", Path()).column("label") == ["fish", "cat", "dog"]
    assert not fetched(log())


def test_row_groups_without_labels_are_pictures_without_labels(log: Log, edit_suite: Edit, rows_pay: None) -> None:
    """Test splits on the Hub often keep their labels back; those that are read whole were taken before."""
    drawn = preview_samples(suite_on(edit_suite, hub="me/hidden", split="test"), "pets", "test", 2, 1)
    assert any(one["range"] for one in log() if fetched([one]))
    assert drawn.labels is None
    assert drawn.images is not None
    with pytest.raises(InputError, match="label -1 is negative"):
        seen(suite_on(edit_suite, hub="me/hidden", split="test", label="label"), 2, 1)


def test_a_suite_is_the_same_before_and_after_its_first_draw(
    tmp_path: Path, edit_suite: Edit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nothing of an interrupted sweep would be found again; and data that moved are others before they are
    drawn."""
    for address in serving(tmp_path / "repositories"):
        log = play(address, tmp_path, monkeypatch)
        suite = suite_on(edit_suite, hub="me/bare", split="test")
        before = suite_stamp(suite)
        assert [name for name, _ in before.data] == ["me/bare"]
        asked = log()
        assert not fetched(asked)
        seen(suite, 2, 1)
        assert suite_stamp(suite) == before
        assert [one["path"].partition("?")[0] for one in asked + log()].count("/api/datasets/me/bare") == 1
        write_pictures(tmp_path / "repositories/datasets/me/bare/main/data/test-00001-of-00002.parquet", range(3, 6))
        seen(suite, 2, 1)
        assert suite_stamp(suite) == before  # this process goes on with what it has read
        forget()
        moved = suite_stamp(suite)
        assert moved.data != before.data
        seen(suite, 2, 1)
        assert suite_stamp(suite) == moved
        forget()
        go_offline(monkeypatch)
        assert suite_stamp(suite) == moved


def test_what_was_fetched_before_a_failure_is_kept(
    log: Log, address: str, edit_suite: Edit, rows_pay: None, monkeypatch: Any
) -> None:
    suite = suite_on(edit_suite, hub="me/bare", split="train")
    monkeypatch.setattr(hub_rows, "_AT_ONCE", 1)
    preview_samples(suite, "pets", "test", 1, 1)
    log()
    send(address, "faults", "POST", [{"match": "GET .*parquet", "times": 2}, {"match": "GET .*parquet", "status": 503}])
    with pytest.raises(InputError, match=r"'me/bare@.* cannot be fetched: the Hub fails with"):
        seen(suite, 4, 5)
    send(address, "faults", "DELETE")
    first = sum(1 for one in log() if fetched([one]) and one["status"] == 206)
    seen(suite, 4, 5)
    second = sum(1 for one in log() if fetched([one]) and one["status"] == 206)
    assert first == 1
    assert 1 <= second <= 3
