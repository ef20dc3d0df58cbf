"""Samples: the same draw for the same seed and task, from every kind of source, and clear refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from lanes import cases_by_message
from PIL import Image
from safetensors.torch import load_file, save_file
from suite_edits import Edit
from tiny_clip import SIDE, clip_inputs

from featcal import evaluate
from featcal.formats.located_model import PicturePreprocessing
from featcal.samples import pool
from featcal.samples.prepare import Preparation
from featcal.samples.sources import draw_samples, open_pool, pick_indices
from featcal.suite.schema import SPLITS, Source, load_suite
from featcal.system.errors import InputError, NoScores


def opened(root: Path, **source: Any) -> Any:
    return open_pool(Source.model_validate(source), "test", root, "t")


def drawn(file: Path, split: str = "test") -> Any:
    """All samples of the task 'pets' of a suite file."""
    suite = load_suite(file)
    return draw_samples(suite, "pets", split, None, 0, clip_inputs(suite.root / "base"))


def test_draw_depends_on_seed_and_task_alone() -> None:
    assert pick_indices(100, 10, 42, "cars") == pick_indices(100, 10, 42, "cars")
    assert pick_indices(100, 10, 42, "cars") != pick_indices(100, 10, 43, "cars")
    assert pick_indices(100, 10, 42, "cars") != pick_indices(100, 10, 42, "dtd")
    assert len(set(pick_indices(100, 10, 42, "cars"))) == 10
    assert pick_indices(5, 10, 42, "cars") == pick_indices(5, None, 0, "dtd") == (0, 1, 2, 3, 4)


def test_zero_samples_are_refused() -> None:
    with pytest.raises(InputError, match="at least one"):
        pick_indices(5, 0, 42, "cars")


def test_tensors_come_as_they_are(tiny_suite_file: Path) -> None:
    suite = load_suite(tiny_suite_file)
    some: Any = draw_samples(suite, "pets", "test", 5, 1, clip_inputs(suite.root / "base"))
    stored = load_file(suite.root / "samples.safetensors")
    assert some.inputs["pixel_values"].equal(stored["pets.test"][list(some.indices)])
    assert some.labels.equal(stored["pets.test.y"][list(some.indices)])
    assert (some.images, some.class_names) == (None, ("cat", "dog", "fish"))


def test_nan_in_calibration_images(own_suite_file: Path) -> None:
    file = own_suite_file.parent / "samples.safetensors"
    content = load_file(file)
    content["pets.calibration"][3] = torch.nan
    save_file(content, file)
    with pytest.raises(InputError, match=r"task 'pets', calibration samples: 432 of .* NaN"):
        drawn(own_suite_file, "calibration")


ARRAYS = {"empty": b"", "torn": b"PK\x03\x04 broken", "alone": b"\x93NUMPY\x01\x00v\x00{'descr': '<f8'}"}
DIGITS = "has a folder per split ('test', 'train'), not one per class; give the folder of a split, such as "
UNUSABLE: dict[str, Any] = {
    DIGITS: {"imagefolder": "digits"},
    "holds torch.uint8: pictures in a file of tensors are preprocessed": {"tensors": "raw.safetensors", "key": "x"},
    "numbers.npz: class_names is float64, expected text": {"arrays": "numbers.npz"},
    "has empty labels": {"jsonl": "blank.jsonl", "input": "{text}", "label": "label"},
    "has the labels 'yes' and 'yes ', two classes": {"jsonl": "spelt.jsonl", "input": "{text}", "label": "label"},
    "does not exist": {"tensors": "none.safetensors", "key": "k"},
    "Did you mean 'pets.calibration'?": {"tensors": "samples.safetensors", "key": "pets.calibratio"},
    "expected [n, channels, height, width]": {"tensors": "samples.safetensors", "key": "pets.test.y"},
    "not a whole safetensors file": {"tensors": "suite.yaml", "key": "k"},
    "is a folder, a pipe or a device": {"tensors": ".", "key": "k"},
    "Did you mean 'letters'?": {"embedded": "lettrs"},
    "no split 'dev'": {"embedded": "letters", "split": "dev"},
    "not a readable .npz": [{"arrays": f"{name}.npz"} for name in ARRAYS],
    "train_x is float32 [2, 4, 4, 3], expected uint8": {"arrays": "fractions.npz", "split": "train"},
    "no test_x and test_y": {"arrays": "fractions.npz"},
    "arrays have no split 'tset'": {"arrays": "fractions.npz", "split": "tset"},
    "is a file": {"imagefolder": "suite.yaml"},
    "one per class": {"imagefolder": "base"},
}


@pytest.mark.parametrize(("source", "message"), cases_by_message(UNUSABLE))
def test_unusable_sources(own_suite_file: Path, source: dict[str, str], message: str) -> None:
    root = own_suite_file.parent
    for name, content in ARRAYS.items():
        (root / f"{name}.npz").write_bytes(content)
    picture = np.zeros((2, 4, 4, 3), dtype=np.uint8)
    np.savez(root / "numbers.npz", test_x=picture, test_y=np.zeros(2, dtype=int), class_names=np.array([0.5, 1]))
    save_file({"x": torch.zeros(2, 3, 4, 4, dtype=torch.uint8)}, root / "raw.safetensors")
    for split in ("train", "test"):
        write_picture(root / "digits" / split / "one" / "a.png", 1)
    for name, labels in (("blank", ["yes", " "]), ("spelt", ["yes", "yes "])):
        rows = [{"text": "a", "label": label} for label in labels]
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    np.savez(root / "fractions.npz", train_x=np.zeros((2, 4, 4, 3), dtype=np.float32), train_y=np.zeros(2))
    with pytest.raises(InputError) as caught:
        opened(root, **source)
    assert message in str(caught.value)


def test_names_in_bytes_are_text(tmp_path: Path) -> None:
    labels = {"test_y": np.zeros(1, dtype=int), "class_names": np.array(["Zürich".encode(), b"b"])}
    np.savez(tmp_path / "x.npz", test_x=np.zeros((1, 4, 4, 3), dtype=np.uint8), **labels)
    assert opened(tmp_path, arrays="x.npz").class_names == ("Zürich", "b")


@pytest.mark.parametrize("nothing", [None, -1])
def test_a_column_without_a_label_is_none_unless_it_is_asked_for(tmp_path: Path, nothing: int | None) -> None:
    """The Hub's splits without labels have it."""
    write_picture(tmp_path / "a.png", 10)
    labels = pa.array([nothing, nothing], pa.int64())
    pq.write_table(pa.table({"image": ["a.png"] * 2, "label": labels}), tmp_path / "x.parquet")
    assert opened(tmp_path, parquet="x.parquet").labels is None
    with pytest.raises(InputError, match=r"labels are whole numbers|is negative"):
        opened(tmp_path, parquet="x.parquet", label="label")


def test_rows_of_every_split_are_said_to_be_used(tmp_path: Path) -> None:
    rows = [{"text": "a", "split": name} for name in ("train", "test", "test")]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"jsonl": "x.jsonl", "input": "{text}"}
    assert opened(tmp_path, **source).notes == (
        "the rows of every split are used ('test', 'train'); give 'split' to take those of one",
    )
    assert (opened(tmp_path, **source, split="test").notes, opened(tmp_path, **source, split="test").size) == ((), 2)
    for name in ("train", "test-00000-of-00001"):
        pq.write_table(pa.table({"text": ["a"]}), tmp_path / f"{name}.parquet")
    source = {"parquet": ".", "input": "{text}"}
    assert "every split are used ('test', 'train')" in opened(tmp_path, **source).notes[0]
    assert opened(tmp_path, **source, split="test").notes == ()


def test_a_split_that_lacks_a_class_counts_the_classes_of_all(own_suite_file: Path, edit_suite: Edit) -> None:
    root = own_suite_file.parent
    for split, names in (("train", ("cat", "dog", "fish")), ("test", ("dog", "fish"))):
        for name in names:
            write_picture(root / split / name / "a.png", 10)

    def change(content: dict[str, Any]) -> None:
        task = content["tasks"]["pets"]
        task.pop("classes", None)
        task.update({split: {"imagefolder": "test" if split == "test" else "train"} for split in SPLITS})

    file = edit_suite(change)
    found, other = drawn(file), drawn(file, "calibration")
    assert found.class_names == other.class_names == ("cat", "dog", "fish")
    assert (found.labels.tolist(), other.labels.tolist()) == ([1, 2], [0, 1, 2])
    assert found.notes == ("no sample is of 'cat', classes of the task's other samples; they are counted all the same",)
    assert other.notes == ()
    (root / "train").rename(root / "moved")
    alone = drawn(file)
    assert alone.class_names == ("dog", "fish")
    assert alone.notes == ()  # a folder that is gone has no classes; what reads it says that it is gone
    (root / "train").write_text("a file")
    assert drawn(file).class_names == ("dog", "fish")


@pytest.mark.parametrize("names", [("Cat", "DOG", "gold-fish"), ("cat", "dog", "gold fish")])
def test_splits_may_spell_their_classes_in_other_ways(
    own_suite_file: Path, edit_suite: Edit, names: tuple[str, ...]
) -> None:
    """Each counted twice, a class of the other spelling took the answers of its twin."""
    for split, own in (("train", ("cat", "dog", "Gold_Fish", "newt")), ("test", names)):
        for name in own:
            write_picture(own_suite_file.parent / split / name / "a.png", 10)

    def change(content: dict[str, Any]) -> None:
        task = content["tasks"]["pets"]
        task.pop("classes", None)
        task.update({split: {"imagefolder": "test" if split == "test" else "train"} for split in SPLITS})

    found = drawn(edit_suite(change))
    assert found.class_names == (*names, "newt")
    assert found.labels.tolist() == [0, 1, 2]
    assert ("no sample is of 'newt'," in found.notes[0], len(found.notes)) == (True, 1)


def test_missing_split_and_a_label_without_a_name(edit_suite: Edit) -> None:
    with pytest.raises(InputError, match="has no name, there are 1 classes"):
        drawn(edit_suite(lambda c: c["tasks"]["pets"].update(classes=["cat"])))
    with pytest.raises(InputError, match="task 'pets', test samples: the suite gives none"):
        drawn(edit_suite(lambda c: c["tasks"]["pets"].pop("test")))


def write_arrays(file: Path, count: int = 30) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    content: dict[str, Any] = {"class_names": np.array(["cat", "dog"])}
    for part in ("train", "test"):
        content[f"{part}_x"] = rng.integers(0, 256, (count, SIDE, SIDE, 3), dtype=np.uint8)
        content[f"{part}_y"] = rng.integers(0, 2, count)
    np.savez(file, **content)
    return content


def test_arrays_and_their_validation_part(own_suite_file: Path, edit_suite: Edit) -> None:
    content = write_arrays(own_suite_file.parent / "x.npz")

    def change(suite: dict[str, Any]) -> None:
        suite["tasks"]["pets"].update({split: {"arrays": "x.npz"} for split in ("calibration", "validation", "test")})
        suite["tasks"]["pets"].pop("classes")

    file = edit_suite(change)
    parts = {split: drawn(file, split) for split in ("calibration", "validation", "test")}
    assert {split: len(part) for split, part in parts.items()} == {"calibration": 27, "validation": 3, "test": 30}
    validation, calibration = ({im.tobytes() for im in parts[s].images} for s in ("validation", "calibration"))
    assert validation == {content["train_x"][i].tobytes() for i in (0, 10, 20)}
    assert not validation & calibration
    assert parts["test"].class_names == ("cat", "dog")


@pytest.mark.parametrize(("most", "clipped"), [(65535, True), (255, False)])
def test_clipped_pictures_are_told(tmp_path: Path, most: int, clipped: bool) -> None:
    """Values stay those of the library's processors, which show all beyond 255 as white."""
    (tmp_path / "bone").mkdir()
    for number in range(2):
        deep = np.array([[0, 100, 255, most]], dtype=np.uint16)
        Image.fromarray(deep).save(tmp_path / "bone" / f"{number}.png")
    pool = opened(tmp_path, imagefolder=".")
    assert pool.images is not None
    assert pool.images([0])[0][0, :, 0].tolist() == [0, 100, 255, 255]
    note = (
        "pictures with values beyond 255, such as 0.png with 65535, are clipped to white, as image processors of "
        "transformers do it; where the models were trained on scaled ones, save them so, with 8 bits a channel"
    )
    assert pool.notes == ((note,) if clipped else ())


def test_pictures_of_numbers_up_to_1_are_refused(tmp_path: Path) -> None:
    """Pillow makes them black."""
    (tmp_path / "bone").mkdir()
    for number, most in enumerate((1, 200, 0)):
        shades = np.array([[0, most / 2, most]], dtype=np.float32)
        Image.fromarray(shades).save(tmp_path / "bone" / f"{number}.tif")
    images = opened(tmp_path, imagefolder=".").images
    assert images is not None
    assert [one[0, :, 0].tolist() for one in images([1, 2])] == [[0, 100, 200], [0, 0, 0]]
    with pytest.raises(InputError, match=r"0\.tif has numbers up to 1, which are read as black; save it with 8 bits"):
        images([0])


def test_imagefolder(tmp_path: Path) -> None:
    for name, shade in (("cat", 10), ("dog", 200)):
        (tmp_path / name).mkdir()
        for i in range(2):
            Image.new("L", (SIDE, SIDE), shade + i).save(tmp_path / name / f"{i}.png")
        Image.new("L", (SIDE, SIDE)).save(tmp_path / name / "._1.png")  # hidden, as is a folder below
    (tmp_path / ".ipynb_checkpoints").mkdir()
    Image.new("L", (SIDE, SIDE)).save(tmp_path / ".ipynb_checkpoints" / "1.png")
    (tmp_path / "dog" / "notes.txt").write_text("not a picture")
    write_picture(tmp_path / "dog" / ".ipynb_checkpoints" / "1-checkpoint.png", 1)
    pool = opened(tmp_path, imagefolder=".")
    assert (pool.size, pool.class_names) == (4, ("cat", "dog"))
    assert pool.notes == ("left out are files whose endings are of no picture that Pillow reads: 1 of .txt",)
    assert pool.labels.tolist() == [0, 0, 1, 1]
    assert [image[0, 0].tolist() for image in pool.images([1, 2])] == [[11, 11, 11], [200, 200, 200]]
    (tmp_path / "cat" / "0.png").write_bytes(b"broken")
    with pytest.raises(InputError, match=r"0\.png is not a readable picture"):
        pool.images([0])


def test_a_folder_without_pictures_is_no_class(tmp_path: Path) -> None:
    """A Mac packs `__MACOSX` beside the classes, full of hidden files."""
    for name in ("0.png", "cat"):
        write_picture(tmp_path / name / "a.png", 5)
    (tmp_path / "__MACOSX" / "cat").mkdir(parents=True)
    (tmp_path / "__MACOSX" / "cat" / "._a.png").write_bytes(b"\0\5\x16\7")
    pool = opened(tmp_path, imagefolder=".")
    assert (pool.class_names, pool.labels.tolist()) == (("0.png", "cat"), [0, 1])
    assert pool.notes == ("folders without pictures are no classes: '__MACOSX'",)
    shutil.rmtree(tmp_path / "cat")
    shutil.rmtree(tmp_path / "0.png")
    with pytest.raises(InputError, match=r"sub-folders .* have no pictures"):
        opened(tmp_path, imagefolder=".")


def test_every_kind_of_picture_that_pillow_decodes_is_read(tmp_path: Path) -> None:
    endings = ("jfif", "jpe", "pgm", "tga", "PNG", "tiff", "ico", "jp2")
    for ending in endings:
        write_picture(tmp_path / "a" / f"x.{ending}", 9)
    for ending in ("h5", "eps", "mpg", "pdf"):  # known to Pillow; not decoded, or by another program
        (tmp_path / "a" / f"x.{ending}").write_bytes(b"other")
    write_picture(tmp_path / "beside.png", 9)
    pool = opened(tmp_path, imagefolder=".")
    assert pool.size == len(endings)
    assert all(image.shape[-1] == 3 for image in pool.images(range(pool.size)))
    left_out, beside = pool.notes
    assert left_out.endswith("1 of .eps, 1 of .h5, 1 of .mpg, 1 of .pdf")
    assert beside == "left out are pictures beside the folders, which have no class: 1"


def write_picture(file: Path, shade: int) -> bytes:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (SIDE, SIDE), shade).save(file)
    return file.read_bytes()


METADATA = [
    {"file_name": "a.png", "label": "dog", "code": 10},
    {"file_name": "sub/b.png", "label": "cat", "code": 2},
    {"file_name": "c.png", "label": "dog", "code": 2},
]


def write_metadata(folder: Path, kind: str) -> Path:
    """Three pictures of shades 1, 2 and 3 in no class folders, and a file that says what they are."""
    for shade, row in enumerate(METADATA, start=1):
        write_picture(folder / str(row["file_name"]), shade)
    if kind == "csv":
        lines = ["file_name,label,code", *(",".join(map(str, row.values())) for row in METADATA)]
        (folder / "metadata.csv").write_text("\n".join(lines))
    elif kind == "jsonl":
        (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, METADATA)))
    else:
        pq.write_table(pa.Table.from_pylist(METADATA), folder / "metadata.parquet")
    return folder


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_imagefolder_with_metadata(tmp_path: Path, kind: str) -> None:
    write_metadata(tmp_path, kind)
    pool = opened(tmp_path, imagefolder=".")
    assert (pool.size, pool.class_names, pool.labels.tolist()) == (3, ("cat", "dog"), [1, 0, 1])
    assert [int(image[0, 0, 0]) for image in pool.images([0, 1, 2])] == [1, 2, 3]
    pool = opened(tmp_path, imagefolder=".", label="code")
    assert (pool.class_names, pool.labels.tolist()) == (None, [10, 2, 2])


def test_imagefolder_with_metadata_that_does_not_fit(tmp_path: Path) -> None:
    write_metadata(tmp_path, "csv")
    with pytest.raises(InputError, match=r"no column 'kind' \(columns: file_name, label, code\)"):
        opened(tmp_path, imagefolder=".", label="kind")
    (tmp_path / "c.png").unlink()
    with pytest.raises(InputError, match=r"names 1 files that are not there, such as c\.png"):
        opened(tmp_path, imagefolder=".")
    (tmp_path / "metadata.jsonl").write_text("{}")
    with pytest.raises(InputError, match=r"has metadata\.csv and metadata\.jsonl; keep one"):
        opened(tmp_path, imagefolder=".")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("file_name,label,label\na.png,0,1\n", r"metadata\.csv has 'label' more than once in its first line; give"),
        ("file_name;label\na.png;0\n", r"no column 'file_name' and no column 'label'; it has 'file_name;label'\. Name"),
        ("file_name,kind\na.png,0\n", r"no column 'label'; it has 'file_name', 'kind'\. Name its columns so"),
    ],
)
def test_metadata_whose_columns_are_not_those_is_told(tmp_path: Path, lines: str, message: str) -> None:
    write_picture(tmp_path / "a.png", 5)
    (tmp_path / "metadata.csv").write_text(lines)
    with pytest.raises(InputError, match=message):
        opened(tmp_path, imagefolder=".")


def test_metadata_without_labels_leaves_the_folders(tmp_path: Path) -> None:
    write_picture(tmp_path / "cat" / "a.png", 5)
    (tmp_path / "metadata.csv").write_text("file_name,caption\ncat/a.png,my cat\n")
    assert opened(tmp_path, imagefolder=".").class_names == ("cat",)


def write_picture_table(file: Path, labels: list[Any], names: list[str] | None = None) -> Path:
    """A parquet file of pictures of shades 10, 11, … as the Hub stores them."""
    file.parent.mkdir(parents=True, exist_ok=True)
    cells = [{"bytes": write_picture(file.parent / "x.png", 10 + i), "path": None} for i in range(len(labels))]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    content = pa.table({"image": pa.array(cells, kind), "label": labels, "fine": labels})
    features: dict[str, Any] = {"image": {"_type": "Image"}, "fine": {"dtype": "int64", "_type": "Value"}}
    if names is not None:
        features["label"] = {"names": names, "_type": "ClassLabel"}
        content = content.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(content, file, row_group_size=2)
    return file


@pytest.mark.parametrize(
    ("labels", "names", "expected"),
    [
        ([2, 0, 1], ["cat", "dog", "fish"], (("cat", "dog", "fish"), [2, 0, 1])),
        ([2, 0, 1], None, (None, [2, 0, 1])),
        ([True, False, True], None, (None, [1, 0, 1])),
        (["dog", "cat", "dog"], None, (("cat", "dog"), [1, 0, 1])),
    ],
)
def test_pictures_in_parquet(tmp_path: Path, labels: list[Any], names: list[str] | None, expected: Any) -> None:
    write_picture_table(tmp_path / "x.parquet", labels, names)
    pool = opened(tmp_path, parquet="x.parquet")
    assert (pool.class_names, pool.labels.tolist()) == expected
    assert [image[3, 3].tolist() for image in pool.images([2, 0])] == [[12] * 3, [10] * 3]


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        ([0, 1], {"image": "picture"}, "needs the column 'picture', which is not there (columns: image, label, fine)"),
        ([0, 1], {"label": "lable"}, "Did you mean 'label'?"),
        ([0, -1], {}, "label -1 is negative"),
        ([0.5, 1.0], {"label": "label"}, "column 'label' holds float"),
        ([0, None], {"label": "label"}, "column 'label' holds NoneType, int"),
        ([[0], [0, 1]], {"label": "label"}, "column 'label' holds list"),
        ([0, 1], {"image": "fine"}, "row 0: holds a int, expected a picture"),
    ],
)
def test_parquet_that_does_not_fit(tmp_path: Path, labels: list[Any], options: dict[str, str], message: str) -> None:
    write_picture_table(tmp_path / "x.parquet", labels)

    with pytest.raises(InputError) as caught:
        opened(tmp_path, parquet="x.parquet", **options).images([0])
    assert message in str(caught.value)


@pytest.mark.parametrize("inside", [("dataset_dict.json",), ("state.json", "dataset_info.json")])
@pytest.mark.parametrize("source", [{"hub": "set", "split": "test"}, {"parquet": "set"}, {"imagefolder": "set"}])
def test_a_folder_of_save_to_disk_is_refused_with_the_way_out(
    tmp_path: Path, inside: tuple[str, ...], source: dict[str, str]
) -> None:
    (tmp_path / "set").mkdir()
    for name in inside:
        (tmp_path / "set" / name).write_text("{}")
    with pytest.raises(InputError, match=r"was written by save_to_disk.*load_from_disk.*to_parquet"):
        opened(tmp_path, **source)


@pytest.mark.filterwarnings("ignore")
def test_pictures_of_a_hub_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    write_picture_table(tmp_path / "set" / "data" / "test-00000-of-00001.parquet", [2, 0, 1], ["cat", "dog", "fish"])
    pool = opened(tmp_path, hub="set", split="test")
    assert (pool.class_names, pool.labels.tolist()) == (("cat", "dog", "fish"), [2, 0, 1])
    assert [image[3, 3].tolist() for image in pool.images([2, 0])] == [[12] * 3, [10] * 3]


def test_names_decide_where_the_source_has_only_names(own_suite_file: Path, edit_suite: Edit) -> None:
    """Folders are counted in sorted order; a suite that lists the same classes in another order means its own."""
    root = own_suite_file.parent
    for name in ("cat", "dog"):
        write_picture(root / "folder" / name / "a.png", 9)

    def labels(*classes: str) -> tuple[list[int], Any]:
        def change(suite: dict[str, Any]) -> None:
            suite["tasks"]["pets"].update(test={"imagefolder": "folder"}, classes=list(classes))

        found = drawn(edit_suite(change))
        return found.labels.tolist(), found.class_names

    assert labels("cat", "dog") == ([0, 1], ("cat", "dog"))
    assert labels("fish", "dog", "cat") == ([2, 1], ("fish", "dog", "cat"))
    assert labels("a cat", "a dog") == ([0, 1], ("a cat", "a dog"))
    assert labels("Dog", "c a t") == ([1, 0], ("Dog", "c a t"))
    with pytest.raises(
        InputError,
        match=r"source has 2 classes \('cat', 'dog'\) and 'classes' 3 classes \('a', 'b', 'c'\): .* share none",
    ):
        labels("a", "b", "c")
    with pytest.raises(InputError, match=r"\('cat', 'dog'\) and 'classes' .* \('cat', 'a dog'\): they share some"):
        labels("cat", "a dog")


def test_folders_called_by_numbers_are_those_classes(own_suite_file: Path, edit_suite: Edit) -> None:
    """Also where a split lacks some; in sorted text '10' would come before '2'."""
    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven"]
    for number in (0, 2, 10, 11):
        write_picture(own_suite_file.parent / "folder" / str(number) / "a.png", 20 * number)
    some = drawn(edit_suite(lambda c: c["tasks"]["pets"].update(test={"imagefolder": "folder"}, classes=names)))
    assert [int(image[0, 0, 0]) for image in some.images] == [0, 40, 200, 220]
    assert [some.class_names[label] for label in some.labels.tolist()] == ["zero", "two", "ten", "eleven"]
    assert "'10' is 'ten'" in some.notes[0]


def test_names_of_a_data_set_in_another_order_are_mapped(own_suite_file: Path, edit_suite: Edit) -> None:
    """Its numbers mean its own names; labels that are words mean themselves, whatever is listed beside them."""
    root = own_suite_file.parent
    write_picture_table(root / "x.parquet", [0, 1, 2], ["fish", "cat", "dog"])
    file = edit_suite(
        lambda c: c["tasks"]["pets"].update(test={"parquet": "x.parquet"}, classes=["Cat", "Dog", "Fish"])
    )
    some = drawn(file)
    assert (some.labels.tolist(), some.class_names, some.notes) == ([2, 0, 1], ("Cat", "Dog", "Fish"), ())
    write_picture_table(root / "x.parquet", ["dog", "fish", "cat"], ["fish", "dog", "cat"])
    assert drawn(file).labels.tolist() == [1, 2, 0]
    write_picture_table(root / "x.parquet", [0, 3], ["fish", "cat", "dog"])
    with pytest.raises(InputError, match="label 3 has no name, there are 3 classes"):
        drawn(file)


@pytest.mark.parametrize(
    ("labels", "kinds"), [([[0], [0, 2]], "list"), ([0, None], "NoneType, int"), ([0.5, 1.0], "float")]
)
def test_a_column_that_holds_no_labels_is_none_unless_it_is_asked_for(
    own_suite_file: Path, edit_suite: Edit, labels: list[Any], kinds: str
) -> None:
    """Calibration needs no labels; scores are refused with the reason, and never made of half of them."""
    write_picture_table(own_suite_file.parent / "x.parquet", labels)
    seen = drawn(edit_suite(lambda c: c["tasks"]["pets"].update(test={"parquet": "x.parquet"})))
    assert (len(seen), seen.labels) == (2, None)
    assert seen.notes[0].startswith(f"no labels, because column 'label' holds {kinds}, and labels are")
    with pytest.raises(NoScores, match=f"no labels to score against.*column 'label' holds {kinds}"):
        evaluate(load_suite(own_suite_file), "merged")


def test_pictures_that_a_parquet_file_names_lie_beside_it(tmp_path: Path) -> None:
    write_picture(tmp_path / "set" / "a.png", 10)
    pq.write_table(pa.table({"image": ["a.png"], "label": [0]}), tmp_path / "set" / "x.parquet")
    (picture,) = opened(tmp_path, parquet="set/x.parquet").images([0])
    assert picture[3, 3].tolist() == [10] * 3


def test_pixels_are_made_in_parts_and_pictures_read_again(
    own_suite_file: Path, edit_suite: Edit, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = write_arrays(own_suite_file.parent / "x.npz")
    file = edit_suite(lambda c: c["tasks"]["pets"].update(test={"arrays": "x.npz"}, classes=["a", "b"]))
    whole = drawn(file)
    one = content["test_x"][0].nbytes
    monkeypatch.setattr(pool, "_AT_ONCE", 7 * one)
    parts = drawn(file)
    assert [len(some) for some in pool.decode_in_parts(list(content["test_x"]))] == [4, 7, 7, 7, 5]
    assert parts.inputs["pixel_values"].equal(whole.inputs["pixel_values"])
    assert len(parts.images) == 30
    assert [im.tobytes() for im in parts.images] == [im.tobytes() for im in content["test_x"]]
    assert np.array_equal(parts.images[-1], content["test_x"][-1])


def test_pictures_of_several_sizes_in_a_row_make_no_batch(own_suite_file: Path, edit_suite: Edit) -> None:
    """The processor leaves sizes as they are, so that every part that is decoded at once has one of its own."""
    for name, width in (("a", SIDE), ("b", SIDE + 4)):
        for number in range(4):
            file = own_suite_file.parent / "pictures" / name / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (width, SIDE)).save(file)
    file = edit_suite(lambda c: c["tasks"]["pets"].update(test={"imagefolder": "pictures"}, classes=["a", "b"]))
    message = rf"leaves them of shapes .*\[3, {SIDE}, {SIDE}\].*\[3, {SIDE}, {SIDE + 4}\].*; crop or resize"
    with pytest.raises(InputError, match=f"task 'pets', test samples: .*{message}"):
        drawn(file)


def test_a_layout_may_make_its_own_pixels(own_suite_file: Path, edit_suite: Edit) -> None:
    content = write_arrays(own_suite_file.parent / "x.npz")
    suite = load_suite(edit_suite(lambda c: c["tasks"]["pets"].update(test={"arrays": "x.npz"}, classes=["a", "b"])))
    own = PicturePreprocessing(lambda images: torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float(), {})
    made = draw_samples(suite, "pets", "test", None, 0, Preparation(Path("nowhere"), "pixels", pictures=own))
    pixels = made.inputs["pixel_values"][5].permute(1, 2, 0).numpy()
    assert pixels.tobytes() == content["test_x"][5].astype("f4").tobytes()


def test_preprocessing_is_the_bases_own(tiny_suite_file: Path) -> None:
    """The tiny processor neither resizes nor crops: values are (x / 255 - mean) / std of CLIP."""
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    ours = clip_inputs(tiny_suite_file.parent / "base").pixels([image])
    mean = np.array([0.48145466, 0.4578275, 0.40821073])
    std = np.array([0.26862954, 0.26130258, 0.27577711])
    expected = torch.from_numpy((image / 255 - mean) / std).permute(2, 0, 1).float()
    torch.testing.assert_close(ours[0], expected, rtol=1e-5, atol=1e-5)


def test_pictures_without_a_processor(tiny_suite_file: Path) -> None:
    with pytest.raises(InputError, match=r"no preprocessor_config\.json"):
        clip_inputs(tiny_suite_file.parent / "experts" / "pets").pixels([np.zeros((4, 4, 3), dtype=np.uint8)])


def test_limit_is_spread_over_the_source(edit_suite: Edit) -> None:
    """Sources are often sorted by class: the first so many would be one class."""
    assert drawn(edit_suite(lambda c: c["tasks"]["pets"]["test"].update(limit=3))).indices == (0, 6, 11)


@pytest.mark.parametrize(
    ("count", "seed", "message"),
    [(0, 42, "0 samples asked for; at least one is needed"), (None, -1, "seed is -1; it is at least 0")],
)
def test_a_draw_of_nothing_or_by_no_seed_is_refused(count: int | None, seed: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        pick_indices(10, count, seed, "pets")
