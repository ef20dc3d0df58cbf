"""A suite out of models and samples as they lie: `featcal suite init` and `featcal diagnose`, and what is guessed."""

from __future__ import annotations

import gzip
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from decimal import Decimal
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml
from command_line import Run, document
from lanes import cases_by_message
from PIL import Image

from featcal import load_suite
from featcal.authoring.from_paths import DEFAULT_MERGE, SuiteParts, write_suite_text
from featcal.authoring.guess import Guess, guess
from featcal.preflight.check import check_suite
from featcal.samples.arrow import read_parquet
from featcal.samples.embedded_pictures import CLASSES, render
from featcal.samples.sources import preview_samples
from featcal.suite.schema import Suite, suite_from_dict
from featcal.system.errors import InputError
from featcal.system.resources import embedded_suites

TEXT = ("sentiment", "paraphrase")
PICTURES = ("shapes", "colors")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def t5(here: Path) -> Path:
    """Models and sentences of t5-mini in a folder, without its suite file."""
    source = embedded_suites()["t5-mini"].parent
    for part in ("base", *(f"experts/{task}" for task in TEXT)):
        shutil.copytree(source / part, here / part)
    for task in TEXT:
        shutil.copy(source / f"{task}.jsonl.gz", here)
    return here


@pytest.fixture
def clip(here: Path) -> Path:
    """Models of clip-mini, and pictures as folders: splits, classes, files."""
    source = embedded_suites()["clip-mini"].parent
    for part in ("base", *(f"experts/{task}" for task in PICTURES)):
        shutil.copytree(source / part, here / part)
    for task in PICTURES:
        for split, name in (("calibration", "train"), ("validation", "val")):
            images, labels = render(task, split)
            for number in range(32):
                folder = here / "pictures" / task / name / CLASSES[task][labels[number]]
                folder.mkdir(parents=True, exist_ok=True)
                Image.fromarray(images[number]).save(folder / f"{number}.png")
    return here


def options(tasks: tuple[str, ...], data: str) -> list[str]:
    experts = [word for task in tasks for word in ("--expert", f"{task}=experts/{task}")]
    samples = [word for task in tasks for word in ("--data", f"{task}={data.format(task)}")]
    return ["--base", "base", *experts, *samples]


def jsonl(file: Path, *rows: dict[str, Any]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gzip.compress(text.encode()) if file.suffix == ".gz" else text.encode())
    return file


# ----------------------------------------------------------------------------------------------- the commands


def test_init_writes_a_suite_that_check_accepts(run: Run, t5: Path) -> None:
    found = document(run("suite", "init", *options(TEXT, "{}.jsonl.gz"), "--out", "mine.yaml", "--json"))
    assert (found["missing"], found["problems"]) == ([], [])
    suite = load_suite("mine.yaml")
    assert check_suite(suite, probe=False).problems == ()
    assert suite.base == "base"
    assert suite.tasks["sentiment"].expert == "experts/sentiment"
    for split, count in (("calibration", 256), ("test", 500)):
        ours, own = (preview_samples(one, "sentiment", split, count, 0) for one in (suite, load_suite("t5-mini")))
        assert ours.indices == own.indices
        assert ours.targets == own.targets
        pairs = list(zip(ours.texts or (), own.texts or (), strict=True))
        assert len(pairs) == count
        assert all(text.endswith("\n") for text, _ in pairs)
        assert all(f"'{text.strip()}'" in prompt for text, prompt in pairs)
    assert any("input is '{first} {second}'" in line for line in found["assumed"])
    head = Path("mine.yaml").read_text().partition("name:")[0]
    assert all(line.startswith("# ") for line in head.splitlines())
    assert "Task Arithmetic at scale 0.3" in head
    assert """input: "{text}\\n\"""" in Path("mine.yaml").read_text()


def test_init_finds_pictures_and_their_splits(run: Run, clip: Path) -> None:
    assert run("suite", "init", *options(PICTURES, "pictures/{}"), "--merged", "ties", "--out", "sub.yaml")[0] == 0
    suite = load_suite("sub.yaml")
    assert suite.splits() == ("calibration", "validation")
    assert suite.tasks["colors"].calibration.imagefolder == "pictures/colors/train"  # type: ignore[union-attr]
    assert suite.merged.method == "ties"  # type: ignore[union-attr]
    drawn = preview_samples(suite, "shapes", "calibration", None, 0)
    images, labels = render("shapes", "calibration")
    assert drawn.class_names == tuple(sorted({CLASSES["shapes"][one] for one in labels[:32]}))
    names = [drawn.class_names[one] for one in drawn.labels.tolist()]  # type: ignore[union-attr]
    assert sorted(names) == sorted(CLASSES["shapes"][one] for one in labels[:32])
    assert len(images[:32]) == len(drawn)


def test_init_takes_nothing_for_granted_of_what_is_said(run: Run, t5: Path) -> None:
    source = "{{jsonl: {0}.jsonl.gz, split: calibration, input: 'Say {{label}}:', target: '{{label}}'}}"
    code, out, err = run("suite", "init", *options(TEXT, source), "--merged", "ties", "--out", "mine.yaml")
    assert (code, out.strip(), err) == (0, "written to mine.yaml", "")


def test_init_says_what_is_missing_and_writes_the_rest(run: Run, t5: Path) -> None:
    given = options(TEXT, "{}.jsonl.gz")[:-2]  # without the samples of the last task
    code, out, err = run("suite", "init", *given, "--out", "mine.yaml")
    assert code == 1
    assert "written to mine.yaml" in out
    assert "to be filled in: calibration samples of paraphrase" in err
    assert "# To be filled in:" in Path("mine.yaml").read_text()
    assert load_suite("mine.yaml").tasks["paraphrase"].calibration is None


def test_init_overwrites_nothing(run: Run, t5: Path) -> None:
    Path("mine.yaml").write_text("mine")
    code, _, err = run("suite", "init", *options(TEXT, "{}.jsonl.gz"), "--out", "mine.yaml")
    assert code == 1
    assert "mine.yaml already exists" in err
    assert Path("mine.yaml").read_text() == "mine"


def test_everything_that_is_not_there_is_said_at_once(run: Run, t5: Path) -> None:
    code, _, err = run(
        "suite", "init", "--base", "./bas",
        "--expert", "sentiment=experts/sentimnet", "--expert", "paraphrase=org/name",
        "--data", "sentiment=sentimnt.jsonl.gz", "--data", "paraphrsae=paraphrase.jsonl.gz", "--out", "mine.yaml",
    )  # fmt: skip
    assert code == 1
    assert not Path("mine.yaml").exists()
    for said in (
        "samples of 'paraphrsae', which has no expert",
        "Did you mean 'paraphrase'?",
        "base: no folder",
        "expert 'sentiment': no folder",
        "Did you mean 'experts/sentiment'?",
        "task 'sentiment': no samples 'sentimnt.jsonl.gz'",
        "Did you mean 'sentiment.jsonl.gz'?",
    ):
        assert said in err


@pytest.mark.parametrize("given", ["cars", "=x", "cars=", " = "])
def test_a_task_has_a_value(run: Run, here: Path, given: str) -> None:
    code, _, err = run("suite", "init", "--base", "b", "--expert", given, "--out", "mine.yaml")
    assert code == 2
    assert "is not TASK=VALUE" in err


def test_a_task_is_given_once(run: Run, here: Path) -> None:
    code, _, err = run("suite", "init", "--base", "b", "--expert", "a=x", "--expert", "a=y", "--out", "mine.yaml")
    assert code == 2
    assert "'a' is given twice" in err


@pytest.mark.slow
def test_diagnose_pictures(run: Run, clip: Path) -> None:
    given = options(PICTURES, "pictures/{}")
    assert run("suite", "init", *given, "--out", "mine.yaml")[0] == 0
    assert run("merge", "mine.yaml", "--out", "merged")[0] == 0
    asked = ("diagnose", "merged", *given, "--eval-samples", "16", "--out", "found.html", "--json")
    found = document(run(*asked))
    assert found["check"]["ok"]
    assert not found["missing"]
    page = Path("found.html").read_text()
    assert "featcal drift found.yaml --model merged" in page
    assert len(page.encode()) == found["report"]["bytes"]
    own = document(run("drift", "found.yaml", "--eval-samples", "16", "--attribution", "--json"))
    for task in PICTURES:  # the suite beside the report gives the report's numbers, those of the recipe
        assert found["drift"]["tasks"][task]["layers"] == own["tasks"][task]["layers"]
        assert own["tasks"][task]["layers"][-1]["relative_drift"] > 0.1
    code, _, err = run(*asked)
    assert code == 1
    assert "found.html already exists" in err


@pytest.mark.slow
def test_diagnose_text(run: Run, t5: Path) -> None:
    given = options(TEXT, "{}.jsonl.gz")
    code, out, err = run("diagnose", "experts/sentiment", *given, "--eval-samples", "8", "--out", "found.html")
    assert code == 0, err
    assert "Nothing of the expert 'paraphrase' is in it (0.00 of its task vector)." in out  # it is the other one itself
    assert "By its weights it is the base and 1.00 of 'sentiment' and 0.00 of 'paraphrase'." in out
    assert "Worst task: 'paraphrase'" in out
    assert "taken for granted: task 'sentiment': sentiment.jsonl.gz: the input is '{text}'" in err
    assert Path("found.yaml").is_file()
    assert Path("found.html").is_file()


def test_diagnose_writes_nothing_of_what_check_refuses(run: Run, t5: Path) -> None:
    given = options(TEXT, "{}.jsonl.gz")
    (t5 / "merged").mkdir()
    code, _, err = run("diagnose", "merged", *given, "--out", "found.html")
    assert code == 1
    assert "merged" in err
    assert not Path("found.html").exists()
    assert not Path("found.yaml").exists()


# -------------------------------------------------------------------------------------------- what is guessed


def test_paths_are_relative_to_the_suite_where_they_lie_below_it(here: Path) -> None:
    for name in ("models/base", "models/a", "elsewhere"):
        (here / name).mkdir(parents=True)
    begun = write_suite_text(
        SuiteParts("models/base", {"a": "models/base+models/a"}, {}, "elsewhere"), here / "models" / "s.yaml"
    )
    content = yaml.safe_load(begun.text)
    assert content["base"] == "base"
    assert content["tasks"]["a"]["expert"] == "base+a"
    assert content["merged"] == str(here / "elsewhere")
    (here / "open").mkdir()
    for name in ("arch.json", "base.pt"):
        (here / "open" / name).touch()
    begun = write_suite_text(
        SuiteParts("open_clip:open/arch.json:open/base.pt", {"a": "org/a"}, {}), here / "open" / "s.yaml"
    )
    assert yaml.safe_load(begun.text)["base"] == "open_clip:arch.json:base.pt"
    assert yaml.safe_load(write_suite_text(SuiteParts("org/b", {"a": "org/a@v1"}, {}), here / "s.yaml").text) == {
        "name": "s", "base": "org/b", "merged": DEFAULT_MERGE, "tasks": {"a": {"expert": "org/a@v1"}}
    }  # fmt: skip


def draw_folders(here: Path, *folders: str) -> None:
    for folder in folders:
        (here / folder).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(here / folder / "0.png")


@pytest.mark.parametrize("classes", [("train", "car", "bus"), ("test", "val", "quiz"), ("eval", "car")])
def test_a_class_may_be_called_like_a_split(here: Path, classes: tuple[str, ...]) -> None:
    draw_folders(here, *(f"d/{name}" for name in classes))
    found = guess("d", here)
    assert found.task == {"calibration": {"imagefolder": "d"}}
    suite = {"name": "s", "base": "b", "merged": "m", "tasks": {"t": {"expert": "e", **found.task}}}
    drawn = preview_samples(suite_from_dict(suite, here), "t", "calibration", None, 0)
    assert drawn.class_names == tuple(sorted(classes))


def test_folders_of_classes_are_splits_by_their_names(here: Path) -> None:
    """Also where a class in them is called like a split, and beside a folder that is none."""
    draw_folders(here, *(f"d/{split}/{name}" for split in ("train", "val", "more") for name in ("train", "car")))
    assert guess("d", here).task == {
        "calibration": {"imagefolder": "d/train"},
        "validation": {"imagefolder": "d/val"},
    }
    draw_folders(here, "listed/train", "listed/more")
    (here / "listed/train/metadata.csv").write_text("file_name,label\n0.png,1\n")
    assert guess("listed", here).task == {"calibration": {"imagefolder": "listed/train"}}
    draw_folders(here, "flat/train", "flat/val")
    with pytest.raises(InputError, match=r"train has no sub-folders; make one per class"):
        guess("flat", here)


def test_splits_by_the_names_of_files(here: Path) -> None:
    for name in ("train.jsonl", "dev.jsonl.gz", "test.jsonl"):
        jsonl(here / "d" / name, {"question": "1 + 1", "answer": "2"}, {"question": "2 + 2", "answer": "4"})
    found = guess("d", here)
    text = {"input": "{question}\n", "target": "{answer}"}
    assert found.task == {
        "calibration": {"jsonl": "d/train.jsonl", **text},
        "validation": {"jsonl": "d/dev.jsonl.gz", **text},
        "test": {"jsonl": "d/test.jsonl", **text},
    }
    assert "d: 'dev.jsonl.gz' is the suite's validation split" in found.assumed
    assert found.missing == ()


def test_parquet_as_the_hub_lays_it_out(here: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    described = {"info": {"features": {"label": {"names": ["no", "yes"], "_type": "ClassLabel"}}}}
    for split in ("train", "validation"):
        table = pa.table({"sentence1": ["a", "b"], "sentence2": ["c", "d"], "label": [0, 1], "idx": [0, 1]})
        table = table.replace_schema_metadata({"huggingface": json.dumps(described)})
        (here / "rte").mkdir(exist_ok=True)
        pq.write_table(table, here / "rte" / f"{split}-00000-of-00001.parquet")
    found = guess("rte", here)
    text = {"input": "{sentence1} {sentence2}\n", "targets": ["no", "yes"]}
    assert found.task == {
        "calibration": {"parquet": "rte", "split": "train", **text},
        "validation": {"parquet": "rte", "split": "validation", **text},
    }
    assert "rte: the answers are the names of classes in column 'label', 'no', 'yes'" in found.assumed


@pytest.mark.parametrize(
    "name", ["{}_0", "data-{}", "{}0", "part.{}", "my-{}-data/0", "split={}/0", "train_and_test/{}_0"]
)
def test_a_split_is_a_word_of_the_name_of_a_parquet_file(here: Path, name: str) -> None:
    """`datasets` reads such a folder so; rows of the test split never get into calibration."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for split, names in {"train": ["Training", "train"], "eval": ["eval"]}.items():
        for rows, called in enumerate(names, start=1):
            file = here / "d" / f"{name.format(called)}.parquet"
            file.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.table({"text": [f"{split} {called}"] * rows, "answer": ["a"] * rows}), file)
    found = guess("d", here)
    assert {split: source["split"] for split, source in found.task.items()} == {"calibration": "train", "test": "eval"}
    assert "d: 'eval' is the suite's test split" in found.assumed
    suite = {"name": "s", "base": "b", "merged": "m", "tasks": {"t": {"expert": "e", **found.task}}}
    for split, text in (("calibration", "train train\n"), ("test", "eval eval\n")):
        drawn = preview_samples(suite_from_dict(suite, here), "t", split, None, 0)
        assert set(drawn.texts or ()) == {text}


@pytest.mark.parametrize("kind", ["a column", "files", "parquet"])
@pytest.mark.parametrize("nothing", [{"label": -1}, {"label": None}, {}])
def test_splits_without_labels_are_left_out(here: Path, kind: str, nothing: dict[str, int | None]) -> None:
    """Test splits of GLUE are so; calibration samples need no labels."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    labels = {"train": {"label": 1}, "dev": {"label": 0}, "test": nothing}
    rows = {split: [{"text": "a"} | one] * 2 for split, one in labels.items()}
    (here / "d").mkdir()
    for split, some in rows.items():
        if kind == "parquet":
            pq.write_table(pa.Table.from_pylist(some), here / "d" / f"{split}.parquet")
        elif kind == "files":
            jsonl(here / "d" / f"{split}.jsonl", *some)
    place = jsonl(here / "d.jsonl", *({**row, "split": one} for one in rows for row in rows[one])).name
    given = {"a column": f"jsonl: {place}", "files": "jsonl: d", "parquet": "parquet: d"}[kind]
    found = guess(f"{{{given}, targets: ['no', 'yes']}}", here)
    assert list(found.task) == ["calibration", "validation"]
    (line,) = (line for line in found.assumed if "left out" in line)
    assert "the test split is left out, for column 'label' is -1, null or missing in all of its rows" in line
    assert not any("all of it is for calibration" in line for line in found.assumed)


def test_splits_without_labels_on_the_hub_are_left_out(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told by first rows, of which no picture is decoded."""
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["no", "yes"])})
    drawn = io.BytesIO()
    Image.new("RGB", (4, 4)).save(drawn, "png")
    for split, labels in (("train", [1]), ("validation", [*[-1] * 63, 1]), ("test", [*[-1] * 64, 1])):
        picture = {"bytes": drawn.getvalue() if split == "train" else b"damaged", "path": None}
        rows = {"image": [picture] * len(labels), "label": labels}
        datasets.Dataset.from_dict(rows, features=features).to_parquet(here / "org" / f"{split}.parquet")
    load = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", lambda _, **more: load("org", streaming=more["streaming"]))
    found = guess("me/set", here)
    assert list(found.task) == ["calibration", "validation"]
    (line,) = (line for line in found.assumed if "left out" in line)
    assert line == (
        "me/set: the test split is left out, for column 'label' is -1, null or missing in its first 64 rows, so that "
        "nothing can be scored on it"
    )


def test_splits_with_some_labels_are_kept(here: Path) -> None:
    """Half of the labels is a mistake, which scores refuse in words."""
    for split, labels in (("train", (-1, -1)), ("test", (1, None))):
        jsonl(here / "d" / f"{split}.jsonl", *({"text": "a", "label": one} for one in labels))
    found = guess("{jsonl: d, targets: [n, y]}", here)
    assert list(found.task) == ["calibration", "test"]
    text = {"input": "{text}", "target": "{a.b}"}  # refused where the suite is read
    assert guess(json.dumps({"jsonl": "d", **text}), here).task["test"]["target"] == "{a.b}"
    suite = {"name": "s", "base": "b", "merged": "m", "tasks": {"t": {"expert": "e", **found.task}}}
    for split, message in (("test", "label None has no answer"), ("calibration", "label -1 .*leave such a split out")):
        with pytest.raises(InputError, match=message):
            preview_samples(suite_from_dict(suite, here), "t", split, None, 0)


def test_one_file_is_all_for_calibration(here: Path) -> None:
    jsonl(here / "a.jsonl", {"prompt": "x", "label": 1})
    found = guess("a.jsonl", here)
    assert found.task == {"calibration": {"jsonl": "a.jsonl", "input": "{prompt}\n"}}
    assert any("all of it is for calibration" in line for line in found.assumed)
    (asked,) = found.missing
    assert "numbers in column 'label' stand for" in asked
    assert asked.endswith("{…, targets: [no, yes]}, or write {…, target: '{label}'} where the number is the answer")


def test_options_that_are_given_are_kept(here: Path) -> None:
    jsonl(here / "a.jsonl", *({"prompt": "x", "label": 1, "split": one} for one in ("train", "test")))
    found = guess("{jsonl: a.jsonl, input: 'Say {prompt}', targets: ['no', 'yes'], limit: 9}", here)
    text = {"input": "Say {prompt}", "targets": ["no", "yes"], "limit": 9}
    assert found.task == {
        "calibration": {"jsonl": "a.jsonl", "split": "train", **text},
        "test": {"jsonl": "a.jsonl", "split": "test", **text},
    }
    assert found.missing == ()
    whole = {"calibration": {"tensors": "x", "key": "k"}, "test": {"jsonl": "a.jsonl", "input": "{prompt}"}}
    assert guess(json.dumps(whole), here) == Guess(whole)
    assert guess("{embedded: shapes}", here).task["test"] == {"embedded": "shapes", "split": "test"}


TURNS = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "No."}]
SHARED = [{"from": "human", "value": "Is it?"}, {"from": "gpt", "value": "No."}]
ALPACA = {"instruction": "Add.", "input": "1, 2", "output": "3"}
CONVERSATIONS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "OpenAI": ({"messages": TURNS, "id": 1}, "messages", "messages"),
    "ShareGPT": ({"conversations": SHARED, "source": "x"}, "conversations", "conversations"),
    "its system apart": ({"system": "Be kind.", "conversations": SHARED}, *2 * (["system", "conversations"],)),
    "another name": ({"chat": TURNS, "prompt": "Is it?"}, "chat", "chat"),
    "prompts of turns": ({"prompt": TURNS[:1], "completion": TURNS[1:]}, *2 * (["prompt", "completion"],)),
    "both": ({"prompt": "Is it?", "messages": TURNS}, "messages", "messages"),
    "prompts": ({"prompt": "Is it?", "completion": "No."}, ["prompt", "completion"], ("{prompt}\n", "{completion}")),
    "Alpaca": (ALPACA, ["instruction", "input", "output"], ("{instruction} {input}\n", "{output}")),
    "preferences": ({"prompt": "Is it?", "chosen": TURNS, "rejected": TURNS}, "chosen", "chosen"),
    "preferences of turns": (
        {"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": TURNS[1:]},
        *2 * (["prompt", "chosen"],),
    ),
    "preferences of texts": (
        {"system": "Be kind.", "question": "Is it?", "chosen": "No.", "rejected": "Ask me later."},
        ["system", "question", "chosen"],
        ("{question}\n", "{chosen}"),
    ),
    "other texts": ({"question": "Is it?", "answer": "No."}, *2 * (("{question}\n", "{answer}"),)),
}


@pytest.mark.parametrize(("row", "chats", "plain"), CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_conversations_are_recognised(here: Path, row: dict[str, Any], chats: Any, plain: Any) -> None:
    """Texts are a conversation where the base has a chat template, else templates."""
    jsonl(here / "a.jsonl", row, {**row, "split": "x"})
    for folder, template, expected in (("chat", {"chat_template": "{{ messages }}"}, chats), ("plain", {}, plain)):
        base = here / folder
        base.mkdir()
        (base / "config.json").write_text(json.dumps({"model_type": "llama"}))
        (base / "tokenizer_config.json").write_text(json.dumps(template))
        (here / "e").mkdir(exist_ok=True)
        found = write_suite_text(
            SuiteParts(folder, {"t": "e"}, {"t": "{calibration: {jsonl: a.jsonl, input: '{x}'}}"}), here / "m"
        )
        assert yaml.safe_load(found.text)["tasks"]["t"]["calibration"] == {"jsonl": "a.jsonl", "input": "{x}"}
        jsonl(here / "a.jsonl", row)
        found = write_suite_text(SuiteParts(folder, {"t": "e"}, {"t": "a.jsonl"}), here / "m.yaml")
        options = dict(zip(("input", "target"), expected, strict=True)) if isinstance(expected, tuple) else {}
        options = options or {"conversation": expected}
        assert yaml.safe_load(found.text)["tasks"]["t"]["calibration"] == {"jsonl": "a.jsonl", **options}
        assert found.missing == ()
        assert any("base's chat template" in line for line in found.assumed) == ("conversation" in options)


def test_columns_of_turns_that_are_several_are_asked_for(here: Path) -> None:
    jsonl(here / "a.jsonl", {"first": TURNS, "second": TURNS})
    found = guess("a.jsonl", here, "turns")
    assert found.task["calibration"] == {"jsonl": "a.jsonl", "input": "{COLUMN}"}
    assert found.missing[0].endswith("or {…, conversation: COLUMN} if one holds the turns of a conversation")
    assert guess("{jsonl: a.jsonl, conversation: second}", here, "turns").task["calibration"] == {
        "jsonl": "a.jsonl",
        "conversation": "second",
    }


LIST = [{"text": "a, b", "label": 1}, {"text": "ü \u2028 NA", "label": 0}]
OTHERS: dict[str, tuple[bytes, list[dict[str, Any]]]] = {
    "x.csv": ('\ufefftext,label\n"a, b",1\nü \u2028 NA,0\nNA,0\n'.encode(), [*LIST, {"text": "NA", "label": 0}]),
    "x.tsv": (b"text\tlabel\na, b\t1\n", LIST[:1]),
    "quoted.csv": (b'"text",label\n"a; b; c",1\n', [{"text": "a; b; c", "label": 1}]),
    "semicolon.csv": ('\ufefftext;label\r\na, b;1\r\n"ü \u2028 NA";0\r\n'.encode(), LIST),
    "three.csv": (b'"a, b, c";text;label\n1;a, b;1\n', [{"a, b, c": 1, **LIST[0]}]),
    "excel.csv": (b"\xef\xbb\xbfsep=;\r\ntext;label\r\na, b;1\r\n", LIST[:1]),
    "tab.csv": (b"text\tlabel\na, b\t1\n", LIST[:1]),
    "x.txt": (b"a\r\n\r\n it's b\r\n", [{"text": "a"}, {"text": "it's b"}]),
    "x.json": (json.dumps(LIST, indent=2).encode(), LIST),
    "x.json.gz": (gzip.compress(json.dumps(LIST).encode()), LIST),
    "x.jsonl": (json.dumps(LIST).encode(), LIST),
}


@pytest.mark.parametrize(("name", "content", "held"), [(name, *rest) for name, rest in OTHERS.items()], ids=OTHERS)
def test_files_of_other_kinds_are_refused_with_the_line_that_converts_them(
    here: Path, name: str, content: bytes, held: list[dict[str, Any]]
) -> None:
    (here / name).write_bytes(content)
    source = {"jsonl": name, "input": "{text}"}
    suite = {"name": "s", "base": "b", "merged": "m", "tasks": {"t": {"expert": "e", "calibration": source}}}
    with pytest.raises(InputError, match=re.escape(name)) as in_file:
        preview_samples(suite_from_dict(suite, Path()), "t", "calibration", None, 0)
    with pytest.raises(InputError, match=re.escape(name)) as on_the_way:
        guess(name, here)
    for caught in (in_file, on_the_way):
        words = shlex.split(str(caught.value).partition("with: ")[2])
        assert words[:2] == ["python", "-c"]
        exec(words[2], {})
        made = Path(str(caught.value).partition("; make ")[2].partition(" of it with: ")[0])
        assert [json.loads(line) for line in made.read_text().splitlines()] == held
        made.unlink()


def test_a_folder_of_tables_is_refused_with_the_line_that_converts_them(here: Path) -> None:
    folder = here / "tables"
    folder.mkdir()
    (folder / "README.txt").write_text("words")
    for name in ("train.csv", "test.csv"):
        (folder / name).write_text("text,label\na,1\n")
    with pytest.raises(InputError, match=r"test\.csv is not read as it is; make .*test\.jsonl of it with: "):
        guess("tables", here)
    (folder / "a.png").write_bytes(b"")  # a table beside pictures may be anything
    with pytest.raises(InputError, match="tables has no sub-folders; make one per class"):
        guess("tables", here)


def test_a_table_with_more_values_than_columns_is_not_cut(here: Path) -> None:
    (here / "x.csv").write_text("text,label\na, b,1\n")
    with pytest.raises(InputError) as caught:
        guess("x.csv", here)
    with pytest.raises(Warning, match="loss of data"):
        exec(shlex.split(str(caught.value).partition("with: ")[2])[2], {})
    assert not (here / "x.jsonl").exists()


def test_other_files_are_refused_whatever_they_are_called_in_the_suite(here: Path) -> None:
    for name in ("x.csv", "x.tar"):
        (here / name).write_bytes(b"0" * 1024)
        for source in ({"parquet": name}, {"arrays": name}, {"imagefolder": name}):
            suite = {"name": "s", "base": "b", "merged": "m", "tasks": {"t": {"expert": "e", "calibration": source}}}
            with pytest.raises(
                InputError, match=rf"{name} is not read as it is; make .*x\.(jsonl|parquet) of it with: "
            ):
                preview_samples(suite_from_dict(suite, here), "t", "calibration", None, 0)
        with pytest.raises(InputError, match=f"{name} is not read as it is"):
            Suite.of(base="b", experts={"t": "e"}, samples={"t": name})
    (here / "x.txt").write_text(json.dumps(LIST[0]))
    source = {"jsonl": "x.txt", "input": "{text}"}  # JSON Lines, whatever their name is
    suite = {"name": "s", "base": "b", "merged": "m", "tasks": {"t": {"expert": "e", "calibration": source}}}
    assert preview_samples(suite_from_dict(suite, here), "t", "calibration", None, 0).texts == ("a, b",)
    (here / "x.json").write_text(json.dumps({"data": LIST}, indent=2))
    with pytest.raises(InputError, match="line 1 is not valid JSON") as caught:
        guess("x.json", here)
    assert "with: python" not in str(caught.value)  # its line is for lists
    jsonl(here / "x.json", *LIST)
    assert guess("x.json", here).task == {"calibration": {"jsonl": "x.json", "input": "{text}\n"}}


@pytest.mark.parametrize("name", ["it's.txt", 'a"b.txt', "cost $HOME.txt", "back`date`tick.txt"])
def test_a_shell_takes_the_conversion_of_any_name(here: Path, name: str) -> None:
    (here / name).write_text("one")
    with pytest.raises(InputError) as caught:
        guess(name, here)
    subprocess.run(["sh", "-c", str(caught.value).partition("with: ")[2]], check=True)
    assert json.loads((here / name).with_suffix(".jsonl").read_text()) == {"text": "one"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_shards_of_webdataset_become_a_table(here: Path) -> None:
    import pyarrow.parquet as pq

    with tarfile.open("x.tar", "w") as shard:
        for name, content in (("0.cls", b"3"), ("0.txt", b"a cat"), ("1.cls", b"1"), ("1.txt", b"a dog")):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            shard.addfile(entry, io.BytesIO(content))
    with pytest.raises(InputError) as caught:
        guess("x.tar", here)
    exec(shlex.split(str(caught.value).partition("with: ")[2])[2], {})
    assert pq.read_table("x.parquet").select(["cls", "txt"]).to_pylist() == [
        {"cls": 3, "txt": "a cat"},
        {"cls": 1, "txt": "a dog"},
    ]


def test_pictures_in_parquet_and_arrays(here: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    picture = {"bytes": b"...", "path": None}
    pq.write_table(pa.table({"img": [picture], "fine_label": [3], "text": ["a"]}), here / "a.parquet")
    found = guess("a.parquet", here)
    assert found.task == {"calibration": {"parquet": "a.parquet", "image": "img", "label": "fine_label"}}
    pq.write_table(pa.table({"image": [picture], "label": [0.5]}), here / "b.parquet")
    found = guess("b.parquet", here)  # a number that counts no classes
    assert found.task == {"calibration": {"parquet": "b.parquet", "image": "image"}}
    assert "b.parquet: no labels, so nothing is scored" in found.assumed
    shard = {"cls": [3], "png": [picture], "__key__": ["0"], "__url__": ["x.tar"]}
    pq.write_table(pa.table(shard), here / "x.parquet")
    found = guess("x.parquet", here)  # as a shard of webdataset becomes a table
    assert found.task == {"calibration": {"parquet": "x.parquet", "image": "png", "label": "cls"}}
    jsonl(here / "x.jsonl", {"cls": 3, "txt": "a", "__key__": "0", "__url__": "x.tar"})
    assert guess("x.jsonl", here, "classes").task == {
        "calibration": {"jsonl": "x.jsonl", "input": "{txt}", "label": "cls"}
    }
    (here / "a.npz").touch()
    assert guess("a.npz", here / "sub").task["test"] == {"arrays": str(here / "a.npz")}


def test_labels_of_databases(here: Path) -> None:
    """duckdb writes some whole numbers as decimals, and texts as bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    whole = pa.array([Decimal(3), None], pa.decimal128(4, 0))
    pq.write_table(pa.table({"text": ["a", "b"], "label": whole}), here / "a.parquet")
    table = read_parquet(here / "a.parquet", None)[0]
    assert [type(value) for value in table.column("label")] == [int, type(None)]
    pq.write_table(pa.table({"text": ["a"], "label": whole[:1]}), here / "a.parquet")
    found = guess("a.parquet", here, "classes")
    assert found.task["calibration"]["label"] == "label"
    texts = {"text": ["a"], "other": ["b"], "score": pa.array([Decimal("3.5")], pa.decimal128(4, 1))}
    pq.write_table(pa.table(texts), here / "a.parquet")
    assert guess("a.parquet", here, "likeness").task["calibration"]["target"] == "{score}"
    pq.write_table(pa.table({"text": ["a"], "label": [b"human"]}), here / "a.parquet")
    found = guess("a.parquet", here, "classes")
    assert found.task["calibration"] == {"parquet": "a.parquet", "input": "{text}", "label": "COLUMN"}
    assert found.missing == ("a.parquet: which column holds the class of every text; say it as {…, label: COLUMN}",)
    stored = io.BytesIO()
    Image.new("L", (2, 2)).save(stored, "png")
    pq.write_table(pa.table({"image": [stored.getvalue(), b"damaged"]}), here / "a.parquet")
    assert guess("a.parquet", here).task["calibration"] == {"parquet": "a.parquet", "image": "image"}


def test_a_name_of_the_catalogue(here: Path) -> None:
    assert guess("svhn", here).task == {"use": "svhn"}


def test_a_data_set_on_the_hub_is_looked_at(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Streamed(list[dict[str, Any]]):
        def select_columns(self, column: str) -> list[dict[str, Any]]:
            return [{column: row[column]} for row in self]

        @property
        def features(self) -> dict[str, Any]:
            return {"label": SimpleNamespace(names=["neg", "pos"])}

    asked = []

    def load_dataset(*place: str, **more: Any) -> dict[str, Streamed]:
        asked.append((place, more))
        return {"train": Streamed([{"text": "a", "label": 1}]), "test": Streamed([])}

    stand_in = ModuleType("datasets")
    stand_in.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", stand_in)
    found = guess("{hub: org/set@v2, config: small}", here)
    source = {"hub": "org/set", "revision": "v2", "config": "small"}
    text = {"input": "{text}\n", "targets": ["neg", "pos"]}
    assert found.task == {
        "calibration": {**source, "split": "train", **text},
        "test": {**source, "split": "test", **text},
    }
    assert asked == [(("org/set",), {"name": "small", "revision": "v2", "streaming": True})]
    monkeypatch.setattr(stand_in, "load_dataset", lambda *_, **__: 1 / 0)
    with pytest.raises(InputError, match=r"cannot be read \(ZeroDivisionError.*hub: org/set, split: train"):
        guess("org/set", here)


REFUSED = {
    "listed.jsonl: the column 'split' holds dict and list, not the name of a split in every row; rename it": [
        "listed.jsonl"
    ],
    "neither a path here": ["nowhere", "lines/nothing"],
    "a.bin does not show the kind of source": "a.bin",
    "names no kind of source": "{file: a.jsonl}",
    "does not exist; relative paths start from the current folder": "{jsonl: b.jsonl}",
    "joined.jsonl: its only column is called 'text;label', as of a table that was not split": "joined.jsonl",
    "none of them called calibration, train, training": "lines",
    "has no sub-folders": "empty",
    "samples: no path": [300 * "x", "~nobody-of-this-name/a.jsonl", "{jsonl: '~nobody-of-this-name/a'}"],
    "samples: not valid YAML": "{jsonl: [}",
}


@pytest.mark.parametrize(("given", "said"), cases_by_message(REFUSED))
def test_what_cannot_be_told_is_refused(here: Path, given: str, said: str) -> None:
    (here / "a.bin").touch()
    (here / "empty").mkdir()
    jsonl(here / "lines" / "mine.jsonl", {"text": "a"})
    jsonl(here / "joined.jsonl", {"text;label": "a;1"})
    jsonl(here / "listed.jsonl", *({"text": "a", "split": one} for one in (["train"], {"a": 1}, "train")))
    with pytest.raises(InputError, match=said):
        guess(given, here)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"a": "x", "b": "y", "c": "z"}], "which columns are the input"),
        ([{"messages": [{"role": "user"}]}], "which columns are the input"),
        ([{"text": "x", "split": "other"}], "which samples are for calibration"),
        ([{"text.a": "x", "title": "y", "split": "train"}], ". Rename 'text.a' first: a template takes plain names"),
        ([{"a:b": "x"}], ". Rename 'a:b' first"),
    ],
)
def test_what_is_not_known_is_asked_for(here: Path, rows: list[dict[str, Any]], said: str) -> None:
    jsonl(here / "a.jsonl", *rows)
    assert any(said in line for line in guess("a.jsonl", here).missing)
