"""Files as nobody should hand them in: what is done to a sound suite, one case per file and damage."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from PIL import Image
from safetensors.torch import save_file
from tiny_text import WORDS, write_lora, write_text_suite

from conftest import CLASSES, SIDE, write_suite

SEED = 20261123
HOMES = ("pictures", "text", "lora")


@dataclass(frozen=True)
class Case:
    """One damage to one file of a sound suite.

    `harmless` cases may also succeed: the damage can lie where nothing is read, or make another sound file.
    """

    kind: str
    name: str
    home: str
    file: str
    """Which file is damaged, relative to the suite's folder; its name has to be in the message, or `says`."""
    damage: Callable[[Path], object]
    """Given the file."""
    harmless: bool = False
    says: str = ""
    dangerous: bool = False
    """May take memory out of proportion: tried in a process of its own with a limit."""


# ------------------------------------------------------------------------------------------------- sound suites


def write_home(root: Path, home: str) -> Path:
    """The suite file of a sound suite that has every kind of file the cases of `home` damage."""
    file = write_suite(root) if home == "pictures" else write_text_suite(root, "t5" if home == "lora" else "llama")
    content = yaml.safe_load(file.read_text())
    if home == "pictures":
        _write_pictures(root)
    else:
        rows = [{"text": f"{WORDS[5 + i]} {WORDS[6 + i]}", "answer": ["yes", "no"][i % 2]} for i in range(8)]
        (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = {"jsonl": "rows.jsonl", "input": "{text}", "target": "{answer}"}
        content["tasks"]["left"]["calibration"] = source
    if home == "lora":
        from safetensors.torch import load_file

        write_lora(root / "adapter", load_file(root / "base/model.safetensors"), 3, 0.1)
        content["tasks"]["left"]["expert"] = "base+adapter"
    file.write_text(yaml.safe_dump(content))
    return file


def _write_pictures(root: Path) -> None:
    chance = np.random.default_rng(SEED)
    pictures = chance.integers(0, 256, (12, SIDE, SIDE, 3), dtype=np.uint8)
    labels = np.arange(12) % len(CLASSES)
    for number, (picture, label) in enumerate(zip(pictures, labels, strict=True)):
        folder = root / "folder" / CLASSES[label]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(folder / f"{number}.png")
    names = np.array(CLASSES)
    np.savez(root / "arrays.npz", train_x=pictures, train_y=labels, test_x=pictures, test_y=labels, class_names=names)
    cells = [{"bytes": (root / "folder" / CLASSES[i % 3] / f"{i}.png").read_bytes(), "path": None} for i in range(12)]
    pq.write_table(pa.table({"image": cells, "label": labels}), root / "rows.parquet")
    lines = ["file_name,label", *(f"{CLASSES[i % 3]}/{i}.png,{CLASSES[i % 3]}" for i in range(12))]
    (root / "metadata.csv").write_text("\n".join(lines))


SOURCES: dict[str, Mapping[str, Any]] = {
    "pictures": {"imagefolder": "folder"},
    "arrays": {"arrays": "arrays.npz"},
    "parquet": {"parquet": "rows.parquet"},
    "metadata": {"imagefolder": "folder", "label": "label"},
}
"""What the task 'pets' is calibrated on, by kind of case."""


def use_source(suite_file: Path, kind: str) -> None:
    """Calibrate 'pets' on the files that cases of a kind damage, where these are no files of the sound suite."""
    source = SOURCES.get(kind)
    if source is None:
        return
    if kind == "metadata":
        (suite_file.parent / "metadata.csv").rename(suite_file.parent / "folder" / "metadata.csv")
    content = yaml.safe_load(suite_file.read_text())
    content["tasks"]["pets"]["calibration"] = dict(source)
    suite_file.write_text(yaml.safe_dump(content))


# ------------------------------------------------------------------------------------------------ any file at all


def _cut(share: float) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])


def _write(content: bytes) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(content)


def _link(target: str) -> Callable[[Path], object]:
    def damage(file: Path) -> None:
        file.unlink()
        file.symlink_to(target)

    return damage


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _sparse(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.truncate(1 << 36)


ANY: dict[str, Callable[[Path], object]] = {
    "empty": _write(b""),
    "half of it": _cut(0.5),
    "the first bytes": _cut(0.02),
    "null bytes": _write(bytes(64)),
    "not UTF-8": _write(b"\xff\xfe\xfa" * 20),
    "packed": lambda file: file.write_bytes(gzip.compress(file.read_bytes())),
    "a folder": _folder,
    "a pipe": _pipe,
    "a link into nothing": _link("nowhere/at/all"),
    "a link to itself": lambda file: _link(file.name)(file),
    "a program": _write(b"\x7fELF" + bytes(60)),
    "a page of the web": _write(b"<!doctype html><html><title>404</title></html>"),
    "a pointer of Git LFS": _write(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"),
}
ENDLESS: dict[str, Callable[[Path], object]] = {"endless": _link("/dev/zero"), "64 GiB of holes": _sparse}


def noise(seed: int) -> Callable[[Path], object]:
    """Some bytes are others."""

    def damage(file: Path) -> None:
        chance, content = random.Random(seed), bytearray(file.read_bytes())
        for _ in range(chance.choice([1, 4, 40])):
            content[chance.randrange(len(content))] = chance.randrange(256)
        file.write_bytes(bytes(content))

    return damage


def any_file(kind: str, home: str, file: str, leave: tuple[str, ...] = (), noisy: int = 6) -> Iterator[Case]:
    for name, damage in ANY.items():
        if name not in leave:
            whole_rows = name == "half of it" and file.endswith(".jsonl")  # the cut may lie between two
            yield Case(kind, name, home, file, damage, harmless=whole_rows)
    for name, damage in ENDLESS.items():
        if name not in leave:
            yield Case(kind, name, home, file, damage, dangerous=True)
    for seed in range(noisy):
        yield Case(kind, f"noise {seed}", home, file, noise(SEED + seed), harmless=True)


# ------------------------------------------------------------------------------------------------ suite files


def _laughs(first: str, line: Callable[[int], str], count: int) -> str:
    return "\n".join([first, *(line(number) for number in range(1, count))])


NESTED_LISTS = _laughs("a0: &a0 [x, x]", lambda i: f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]", 12)
MERGED_KEYS = _laughs("a0: &a0 {k: 1}", lambda i: f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}", 12)
SUITE_HEAD = "name: s\nbase: base\nmerged: {method: task-arithmetic, scale: 0.5}\ntasks: {t: {expert: base}}\n"
YAMLS: dict[str, str] = {
    "deep lists": "[" * 4000,
    "deep mappings": "{a: " * 4000,
    "deep blocks": "\n".join(" " * depth + "- " for depth in range(1500)),
    "laughs in lists": NESTED_LISTS,
    "laughs in a suite": f"{NESTED_LISTS}\n{SUITE_HEAD}description: *a11",
    "laughs by merging": MERGED_KEYS,
    "merging in a suite": f"{MERGED_KEYS}\n{SUITE_HEAD}calibration: *a11",
    "a list in itself": f"{SUITE_HEAD}description: &a [*a]",
    "a mapping in itself": f"{SUITE_HEAD}calibration: &a {{lam: *a}}",
    "merged with itself": f"{SUITE_HEAD}calibration: &a {{<<: *a}}",
    "40,000 values": f"{SUITE_HEAD}calibration: {{{', '.join(f'k{i}: {i}' for i in range(40_000))}}}",
    "20,000 tasks": f"{SUITE_HEAD.splitlines()[0]}\nbase: base\ntasks:\n" + "\n".join(
        f"  t{i}: 1" for i in range(20_000)
    ),
    "ten megabytes": f"{SUITE_HEAD}description: {'x' * 10_000_000}",
    "duplicate keys": f"{SUITE_HEAD}name: t",
    "duplicate tasks": "name: s\nbase: b\ntasks: {t: {expert: b}, t: {expert: c}}",
    "two documents": f"{SUITE_HEAD}---\n{SUITE_HEAD}",
    "a tab": f"{SUITE_HEAD}\tdescription: x",
    "an unknown alias": f"{SUITE_HEAD}description: *nobody",
    "a directive": f"%YAML 9.9\n---\n{SUITE_HEAD}",
    "no mapping as a key": f"{SUITE_HEAD}? {{a: 1}}\n: 2",
    "a control character": f"{SUITE_HEAD}description: \x1b[31m",
    "a number with 5,000 digits": f"{SUITE_HEAD}description: {'9' * 5000}",
    "an open quote": f'{SUITE_HEAD}description: "x',
    "an open bracket": f"{SUITE_HEAD}description: [x",
    **{f"the tag {tag}": f"{SUITE_HEAD}description: {tag}" for tag in (
        "!!int ''", "!!int x", "!!float ''", "!!float x", "!!bool x", "!!timestamp x", "!!timestamp 2026-99-99",
        "!!binary é", "!!set x", "!!omap x", "!!pairs [1]", "!!seq x", "!!map x", "!!null x",
        "!!python/object/apply:os.system [true]", "!!python/name:os.system", "!!python/module:os",
        "!!python/object/new:type [x]", "!include /etc/passwd", "!!str {a: 1}",
    )},
}  # fmt: skip
HARMLESS_YAMLS = {"the tag !!null x"}

WRONG: dict[str, Any] = {
    "nothing": None, "an empty list": [], "an empty mapping": {}, "a list": [1, "x"], "a mapping": {"x": 1},
    "true": True, "minus one": -1, "a fraction": 0.5, "1e400": float("inf"), "NaN": float("nan"), "10^200": 10**200,
    "an empty text": "", "a null character": "a\0b", "a long text": "x" * 20_000, "escapes": "\x1b[31mred",
    "upwards": "../../../../../../etc", "a home": "~nobody-at-all/x", "markup": "<script>alert(1)</script>",
    "deep": [[[[[[[[1]]]]]]]],
}  # fmt: skip
PLACES = (
    "base", "merged", "merged.method", "merged.scale", "tasks", "tasks.pets", "tasks.pets.expert", "tasks.pets.classes",
    "tasks.pets.calibration", "tasks.pets.calibration.tensors", "tasks.pets.calibration.key",
    "tasks.pets.calibration.labels", "tasks.pets.templates", "tasks.pets.metric", "calibration", "calibration.lam",
    "calibration.samples", "calibration.blocks", "vocabulary", "name",
)  # fmt: skip
FITTING = {
    "tasks.pets.calibration": ("nothing",),
    "tasks.pets.calibration.labels": ("nothing",),
    "tasks.pets.classes": ("nothing",),
    "calibration": ("an empty mapping",),
    "calibration.lam": ("nothing", "a fraction"),
    "calibration.samples": ("nothing", "10^200"),
    "calibration.blocks": ("nothing",),
    "merged.scale": ("minus one", "a fraction", "nothing"),
    "name": ("a null character", "a long text", "escapes", "upwards", "a home", "markup"),
}
"""Values that may stand there."""


def _set(content: Any, place: str, value: Any) -> None:
    *path, last = place.split(".")
    for part in path:
        content = content.setdefault(part, {})
    content[last] = value


def _set_yaml(place: str, value: Any) -> Callable[[Path], object]:
    def damage(file: Path) -> None:
        content = yaml.safe_load(file.read_text())
        _set(content, place, value)
        file.write_text(yaml.safe_dump(content))

    return damage


def suite_files() -> Iterator[Case]:
    file = "suite.yaml"
    yield from any_file("suite file", "pictures", file, noisy=20)
    for name, text in YAMLS.items():
        harmless = name in HARMLESS_YAMLS
        yield Case("suite file", name, "pictures", file, _write(text.encode()), harmless, dangerous="laugh" in name)
    for place in PLACES:
        for name, value in WRONG.items():
            fits = name in FITTING.get(place, ())
            yield Case("suite value", f"{place}: {name}", "pictures", file, _set_yaml(place, value), fits, says=place)


# ------------------------------------------------------------------------------------------------ safetensors


def _split(file: Path) -> tuple[dict[str, Any], bytes]:
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def _joined(header: bytes, data: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def _header(change: Callable[[dict[str, Any], str], object]) -> Callable[[Path], object]:
    """`change` is given the header and the name of a tensor in it."""

    def damage(file: Path) -> None:
        header, data = _split(file)
        change(header, next(name for name in sorted(header) if name != "__metadata__"))
        file.write_bytes(_joined(json.dumps(header).encode(), data))

    return damage


def _entry(**changed: Any) -> Callable[[Path], object]:
    return _header(lambda header, name: header[name].update(changed))


def _raw(header: bytes, length: int | None = None) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(_joined(header, _split(file)[1], length))


def _overlap(header: dict[str, Any], name: str) -> None:
    other = next(one for one in header if one not in (name, "__metadata__"))
    header[name] = dict(header[other])


SAFETENSORS: dict[str, Callable[[Path], object]] = {
    "length 0": _raw(b"", 0), "length 2^64 - 1": _raw(b"{}", 2**64 - 1), "length 2^63": _raw(b"{}", 2**63),
    "length beyond the file": _raw(b"{}", 10**9), "length 100 MB and one": _raw(b"{}", 100_000_001),
    "no JSON": _raw(b"{]"), "a list": _raw(b"[]"), "a number": _raw(b"7"), "deep": _raw(b"[" * 100_000),
    "deep metadata": _raw(b'{"__metadata__":' + b"{" * 9000), "spaces": _raw(b" " * 64),
    "a name not in UTF-8": _raw(b'{"\xff":1}'),
    "an empty header": _raw(b"{}"), "offsets backwards": _entry(data_offsets=[64, 0]),
    "offsets negative": _entry(data_offsets=[-64, 0]), "offsets beyond": _entry(data_offsets=[2**40, 2**40 + 64]),
    "offsets 2^64": _entry(data_offsets=[0, 2**64]), "one offset": _entry(data_offsets=[0]),
    "offsets as text": _entry(data_offsets=["0", "64"]), "no offsets": _header(lambda h, n: h[n].pop("data_offsets")),
    "an unknown dtype": _entry(dtype="F33"), "a dtype that is none": _entry(dtype=None),
    "complex": _entry(dtype="C64"), "4 bits": _entry(dtype="F4"), "boolean": _entry(dtype="BOOL"),
    "another width": _entry(dtype="F64"), "no dtype": _header(lambda h, n: h[n].pop("dtype")),
    "a shape that overflows": _entry(shape=[2**33, 2**33]), "a shape of 2^62": _entry(shape=[2**62]),
    "a negative shape": _entry(shape=[-1, 4]), "a shape of fractions": _entry(shape=[1.5]),
    "a shape as text": _entry(shape="4x4"), "no shape": _header(lambda h, n: h[n].pop("shape")),
    "a shape with 0": _entry(shape=[0]), "another shape": _entry(shape=[1, 2, 3]),
    "1,000 dimensions": _entry(shape=[1] * 1000), "an overlap": _header(_overlap),
    "a list as metadata": _header(lambda h, n: h.update(__metadata__=[1])),
    "an entry that is a list": _header(lambda h, n: h.update({n: []})),
    "another name": _header(lambda h, n: h.update({"x" * 9: h.pop(n)})),
    "a name with escapes": _header(lambda h, n: h.update({"\x1b[31m": h.pop(n)})),
    "duplicate names": _raw(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
                            b'"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}'),
    "bytes missing": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "bytes left over": lambda file: file.write_bytes(file.read_bytes() + b"x"),
}  # fmt: skip


def _values(value: float) -> Callable[[Path], object]:
    def damage(file: Path) -> None:
        from safetensors.torch import load_file

        save_file(
            {n: torch.full_like(t, value) if t.is_floating_point() else t for n, t in load_file(file).items()}, file
        )

    return damage


def safetensors_files() -> Iterator[Case]:
    files = [("pictures", "base/model.safetensors"), ("pictures", "experts/pets/model.safetensors"),
             ("pictures", "samples.safetensors"), ("lora", "adapter/adapter_model.safetensors")]  # fmt: skip
    for home, file in files:
        yield from any_file("safetensors", home, file, noisy=8)
        for name, damage in SAFETENSORS.items():
            yield Case(
                "safetensors", name, home, file, damage, harmless=name in ("a name with escapes", "another name")
            )
        for name, value in {"all NaN": float("nan"), "all infinite": float("inf")}.items():
            yield Case("safetensors", name, home, file, _values(value), says="NaN")


def _index(content: Any) -> Callable[[Path], object]:
    def damage(file: Path) -> None:
        file.unlink()
        (file.parent / "model.safetensors.index.json").write_text(json.dumps(content))

    return damage


INDICES: dict[str, Any] = {
    "upwards": {"weight_map": {"a": "../base/model.safetensors"}}, "absolute": {"weight_map": {"a": "/etc/passwd"}},
    "no map": {}, "a list": {"weight_map": ["a"]}, "a number": {"weight_map": {"a": 1}},
    "empty": {"weight_map": {}}, "nothing": {"weight_map": {"a": None}},
    "absent": {"weight_map": {"a": "b.safetensors"}},
    "a null character": {"weight_map": {"a": "b\0.safetensors"}}, "here": {"weight_map": {"a": "."}},
    "long": {"weight_map": {"a": "x" * 9000}}, "above": {"weight_map": {"a": ".."}},
    "no name": {"weight_map": {"a": ""}},
    "itself": {"weight_map": {"a": "config.json"}}, "a list of names": {"weight_map": {"a": ["b"]}},
}  # fmt: skip


def indices() -> Iterator[Case]:
    for role in ("base", "experts/pets"):
        for name, content in INDICES.items():
            yield Case("index of shards", name, "pictures", f"{role}/model.safetensors", _index(content))


# ------------------------------------------------------------------------------------------------ JSON


JSONS: dict[str, bytes] = {
    "a list": b"[]", "a number": b"7", "null": b"null", "deep": b"[" * 200_000, "deep mappings": b'{"a":' * 100_000,
    "digits": b'{"a": ' + b"7" * 5000 + b"}", "two values": b"{} {}", "a comment": b"{} // no",
    "a trailing comma": b'{"a": 1,}',
    "an empty mapping": b"{}",
}  # fmt: skip
_LOOSE = ("an empty mapping",)
ABSENT = ("a folder", "a pipe", "a link into nothing", "a link to itself", "endless")
"""Damages after which there is no file: fine where a model need not have one."""


def _set_json(place: str, value: Any) -> Callable[[Path], object]:
    def damage(file: Path) -> None:
        content = json.loads(file.read_text())
        _set(content, place, value)
        file.write_text(json.dumps(content))

    return damage


ABSURD: dict[str, Any] = {
    "minus one": -1, "0": 0, "2^40": 2**40, "10^30": 10**30, "1e308": 1e308, "NaN": float("nan"), "text": "x",
    "nothing": None, "a list": [1], "a mapping": {"a": 1}, "true": True, "a fraction": 2.5,
}  # fmt: skip
NUMBERS = {
    ("pictures", "base/config.json"): (
        "vision_config.hidden_size", "vision_config.num_hidden_layers", "vision_config.num_attention_heads",
        "vision_config.image_size", "vision_config.patch_size", "vision_config.intermediate_size",
        "text_config.vocab_size", "text_config.hidden_size", "projection_dim",
        "model_type", "vision_config", "vision_config.hidden_act", "vision_config.layer_norm_eps",
    ),
    ("text", "base/config.json"): (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
        "rms_norm_eps", "rope_theta", "rope_scaling", "model_type", "architectures",
    ),
    ("pictures", "experts/pets/config.json"): ("hidden_size", "num_hidden_layers", "model_type", "patch_size"),
}  # fmt: skip


def json_files() -> Iterator[Case]:
    whole = [("pictures", "base/config.json"), ("text", "base/config.json"), ("pictures", "experts/pets/config.json"),
             ("lora", "adapter/adapter_config.json"), ("pictures", "base/preprocessor_config.json"),
             ("text", "base/tokenizer.json"), ("text", "base/tokenizer_config.json")]  # fmt: skip
    for home, file in whole:
        optional = file.endswith(("preprocessor_config.json", "tokenizer_config.json"))
        yield from any_file("JSON of models", home, file, ABSENT if optional else (), noisy=8)
        for name, content in JSONS.items():
            loose = name in _LOOSE
            yield Case("JSON of models", name, home, file, _write(content), harmless=loose)
    for (home, file), places in NUMBERS.items():
        for place in places:
            for name, value in ABSURD.items():
                kind = "values of config.json"
                yield Case(kind, f"{place}: {name}", home, file, _set_json(place, value), harmless=True)


ADAPTER: dict[str, Any] = {
    "peft_type": [None, 1, "LOHA", ["LORA"], {}], "r": [0, -1, 1.5, "4", None, 10**30, True, 5],
    "lora_alpha": [float("nan"), float("inf"), "8", None, []], "target_modules": ["(", "(a+)+$" * 50, 7, {}, [1]],
    "rank_pattern": [{"q": 0}, {"(": 1}, [], {"q": "x"}, 3],
    "alpha_pattern": [{"q": None}, {"(": 1}, {"q": float("inf")}],
    "use_dora": [True, "x"], "modules_to_save": [1, [1], "q"], "layers_to_transform": [], "fan_in_fan_out": ["yes", 1],
    "init_lora_weights": [3, "pissa", []], "base_model_name_or_path": [3, [1]], "use_rslora": ["x"],
}  # fmt: skip


def adapters() -> Iterator[Case]:
    for option, values in ADAPTER.items():
        for value in values:
            name = f"{option}: {value!r}"[:60]
            yield Case(
                "adapter options",
                name,
                "lora",
                "adapter/adapter_config.json",
                _set_json(option, value),
                name.startswith("modules_to_save"),
            )


# ------------------------------------------------------------------------------------------------ pictures


def _png(width: int, height: int, depth: int = 8, colour: int = 2, data: bytes = b"") -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def _saved(kind: str, size: tuple[int, int] = (SIDE, SIDE), mode: str = "RGB") -> bytes:
    stream = io.BytesIO()
    Image.new(mode, size).save(stream, kind)
    return stream.getvalue()


def _bomb() -> bytes:
    """A picture of 12,000 by 12,000 one-bit pixels in some kilobytes: 144 million pixels."""
    rows = zlib.compress(bytes((12_000 // 8 + 1) * 12_000), 9)
    return _png(12_000, 12_000, 1, 0, rows)


PICTURES: dict[str, Callable[[], bytes]] = {
    "no data": lambda: _png(SIDE, SIDE), "0 by 0": lambda: _png(0, 0), "0 wide": lambda: _png(0, SIDE),
    "2^31 by 2^31": lambda: _png(2**31 - 1, 2**31 - 1), "100,000 by 100,000": lambda: _png(100_000, 100_000),
    "damaged data": lambda: _png(SIDE, SIDE, data=b"damaged"), "an odd depth": lambda: _png(SIDE, SIDE, depth=3),
    "too little data": lambda: _png(SIDE, SIDE, data=zlib.compress(b"x")),
    "SVG": lambda: b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
    "PostScript": lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n",
    "half a JPEG": lambda: _saved("JPEG")[:-40], "half a GIF": lambda: _saved("GIF")[:40],
    "half a TIFF": lambda: _saved("TIFF")[:60], "half a WebP": lambda: _saved("WEBP")[:20],
    "half a BMP": lambda: _saved("BMP")[:60], "a huge PPM": lambda: b"P6 2000000 2000000 255\n",
    "a negative BMP": lambda: _saved("BMP")[:18] + struct.pack("<ii", -5, 2**31 - 1) + _saved("BMP")[26:],
    "a wide TIFF": lambda: _saved("TIFF").replace(struct.pack("<HHI", 256, 4, 1), struct.pack("<HHI", 256, 4, 2**31))[
        :90
    ],
}  # fmt: skip


def pictures() -> Iterator[Case]:
    file = "folder/cat/0.png"
    yield from any_file(
        "pictures", "pictures", file, leave=("a folder", "a link into nothing", "64 GiB of holes"), noisy=8
    )
    for name, made in PICTURES.items():
        yield Case("pictures", name, "pictures", file, lambda path, made=made: path.write_bytes(made()))
    bomb = Case("pictures", "a bomb", "pictures", file, lambda path: path.write_bytes(_bomb()), dangerous=True)
    yield bomb
    for kind in ("JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM"):
        yield Case("pictures", f"{kind} named .png", "pictures", file, _write(_saved(kind)), harmless=True)
    for mode in ("1", "L", "P", "LA", "RGBA", "I;16"):
        yield Case("pictures", f"mode {mode}", "pictures", file, _write(_saved("PNG", mode=mode)), harmless=True)


# ------------------------------------------------------------------------------------------------ arrays


class _Runs:
    """Would write a file when it is unpickled."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (self.where,))


def _arrays(**changed: Any) -> Callable[[Path], object]:
    def damage(file: Path) -> None:
        with np.load(file) as content:
            arrays = dict(content)
        for name, value in changed.items():
            arrays.pop(name) if value is None else arrays.update({name: value(file) if callable(value) else value})
        np.savez(file, **arrays)

    return damage


def _objects(file: Path) -> Any:
    held = np.empty(12, dtype=object)
    held[:] = [_Runs(str(file.parent / "RAN"))] * 12
    return held


def _npy(shape: str, descr: str = "'|u1'", version: tuple[int, int] = (1, 0), data: bytes = b"") -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY" + bytes(version) + struct.pack("<H", len(header)) + header + data


def _member(content: bytes) -> Callable[[Path], object]:
    """`train_x.npy` in the archive holds these bytes."""

    def damage(file: Path) -> None:
        with zipfile.ZipFile(file) as archive:
            kept = {name: archive.read(name) for name in archive.namelist() if name != "train_x.npy"}
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in {**kept, "train_x.npy": content}.items():
                archive.writestr(name, data)

    return damage


ARRAYS: dict[str, Callable[[Path], object]] = {
    "objects": _arrays(train_y=_objects), "objects as pictures": _arrays(train_x=_objects),
    "objects as names": _arrays(class_names=_objects), "no pictures": _arrays(train_x=None),
    "no labels": _arrays(train_y=None), "labels as fractions": _arrays(train_y=np.linspace(0, 1, 12)),
    "labels NaN": _arrays(train_y=np.full(12, np.nan)), "labels negative": _arrays(train_y=np.full(12, -1)),
    "labels as text": _arrays(train_y=np.array(["x"] * 12)), "labels a scalar": _arrays(train_y=np.array(1)),
    "labels 2^63": _arrays(train_y=np.full(12, 2**63, dtype=np.uint64)),
    "labels of times": _arrays(train_y=np.full(12, 0, dtype="datetime64[s]")),
    "too few labels": _arrays(train_y=np.zeros(3, dtype=np.int64)), "pictures a scalar": _arrays(train_x=np.array(1)),
    "pictures flat": _arrays(train_x=np.zeros((12, 5), dtype=np.uint8)),
    "pictures of fractions": _arrays(train_x=np.zeros((12, SIDE, SIDE, 3))),
    "pictures empty": _arrays(train_x=np.zeros((0, SIDE, SIDE, 3), np.uint8), train_y=np.zeros(0, np.int64)),
    "pictures of 0 pixels": _arrays(train_x=np.zeros((12, 0, 0, 3), np.uint8)),
    "a header of 2^40 pixels": _member(_npy("(12, 300000, 300000, 3)")),
    "a header of 2^90": _member(_npy("(1099511627776, 1099511627776, 1099511627776, 3)")),
    "a negative header": _member(_npy("(-1, 4, 4, 3)")), "a header of text": _member(_npy("'x'")),
    "a header that calls": _member(_npy("(__import__('os').mkdir('RAN'),)")),
    "a deep header": _member(_npy("(" * 5000)),
    "a header of objects": _member(_npy("(12,)", "'|O'", data=b"cos\nsystem\n.")),
    "version 9": _member(_npy("(1,)", version=(9, 0))), "no array": _member(b"text"), "an empty array": _member(b""),
    "an unknown type": _member(_npy("(1,)", "'<z9'")),
    "a member named upwards": lambda file: zipfile.ZipFile(file, "w").writestr("../../train_x.npy", _npy("(1,)")),
    "an empty archive": lambda file: zipfile.ZipFile(file, "w").close(),
}  # fmt: skip


def _zeros(file: Path) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("train_x.npy", "w", force_zip64=True) as stream:
            stream.write(_npy("(20000, 256, 256, 3)"))
            for _ in range(3750):
                stream.write(bytes(1 << 20))
        archive.writestr("train_y.npy", _npy("(20000,)", data=bytes(20000)))


def npz_files() -> Iterator[Case]:
    file = "arrays.npz"
    yield from any_file("arrays", "pictures", file, noisy=15)
    for name, damage in ARRAYS.items():
        yield Case("arrays", name, "pictures", file, damage)
    yield Case("arrays", "3.7 GiB of zeros in 4 MB", "pictures", file, _zeros, dangerous=True)


# ------------------------------------------------------------------------------------------------ rows


ROW = b'{"text": "w1 w2", "answer": "yes"}\n'
LINES: dict[str, bytes] = {
    "a list": b"[1, 2]\n", "a number": b"7\n", "null": b"null\n", "deep": b"[" * 100_000 + b"\n",
    "deep mappings": b'{"a":' * 100_000 + b"\n", "digits": b'{"text": ' + b"7" * 5000 + b"}\n",
    "null bytes in a row": ROW[:-1] + b"\0\n", "cut": ROW[:20], "blank lines": b"\n\n \n",
    "no field": b'{"other": 1}\n', "a list as text": b'{"text": [1], "answer": "yes"}\n',
    "a mapping as text": b'{"text": {"a": 1}, "answer": "yes"}\n', "null as text": b'{"text": null, "answer": "yes"}\n',
    "an empty text": b'{"text": "", "answer": "yes"}\n', "an empty answer": b'{"text": "w1", "answer": " "}\n',
    "UTF-16": ROW.decode().encode("utf-16"), "a row not in UTF-8": ROW.replace(b"w1", b"\xff\xfe"),
    "a sound row before": ROW + b"{\n", "single quotes": b"{'text': 'w1'}\n",
    "a half surrogate": b'{"text": "\\ud800", "answer": "yes"}\n',
}  # fmt: skip


def _endless_line(file: Path) -> None:
    """A line of 3 GiB without an end."""
    with file.open("wb") as stream:
        stream.truncate(3 << 30)


def _table(content: Mapping[str, Any]) -> Callable[[Path], object]:
    return lambda file: pq.write_table(pa.table(dict(content)), file)


def rows() -> Iterator[Case]:
    file = "rows.jsonl"
    leave = ("64 GiB of holes",)
    yield from any_file("rows", "text", file, leave, noisy=12)
    for name, content in LINES.items():
        yield Case("rows", name, "text", file, _write(content), harmless=name == "a half surrogate")
    yield Case("rows", "a line without an end", "text", file, _endless_line, dangerous=True)
    yield from any_file("parquet", "pictures", "rows.parquet", noisy=25)
    for name, table in TABLES.items():
        yield Case(
            "parquet", name, "pictures", "rows.parquet", lambda path, table=table: pq.write_table(pa.table(table), path)
        )
    yield from any_file("metadata", "pictures", "folder/metadata.csv", noisy=10)
    for name, text in CSV.items():
        yield Case(
            "metadata",
            name,
            "pictures",
            "folder/metadata.csv",
            _write(text.encode()),
            harmless=name in ("a huge number",),
        )


CSV = {
    "upwards": "file_name,label\n../suite.yaml,cat\n", "absolute": "file_name,label\n/etc/passwd,cat\n",
    "no name": "file_name,label\n,cat\n", "no column": "name,label\ncat/0.png,cat\n",
    "a short row": "file_name,label\ncat/0.png\n",
    "a null character": "file_name,label\ncat/0\0.png,cat\n", "a long row": "file_name,label\ncat/0.png,cat,1,2,3\n",
    "an open quote": 'file_name,label\n"cat/0.png,cat\n', "a long name": f"file_name,label\n{'x' * 9000},cat\n",
    "no rows": "file_name,label\n", "a huge number": f"file_name,label\ncat/0.png,{'9' * 30}\n",
    "a huge field": f"file_name,label\n{'x' * 200_000},cat\n",
}  # fmt: skip
TABLES: dict[str, dict[str, Any]] = {
    "no picture": {"label": [1, 2]}, "numbers as pictures": {"image": [1, 2], "label": [0, 1]},
    "empty bytes": {"image": [b"", b""], "label": [0, 1]},
    "nothing as pictures": {"image": [None, None], "label": [0, 1]},
    "labels as fractions": {"image": [_png(1, 1)] * 2, "label": [0.5, float("nan")]},
    "labels nothing": {"image": [_png(1, 1)] * 2, "label": [None, 1]},
    "labels 2^63": {"image": [_png(1, 1)] * 2, "label": pa.array([2**63, 1], pa.uint64())},
    "paths upwards": {"image": [{"bytes": None, "path": "../../../etc/passwd"}] * 2, "label": [0, 1]},
    "absolute paths": {"image": [{"bytes": None, "path": "/etc/passwd"}] * 2, "label": [0, 1]},
    "no rows": {"image": pa.array([], pa.binary()), "label": pa.array([], pa.int64())},
    "labels negative": {"image": [_png(1, 1)] * 2, "label": [-1, 1]},
}  # fmt: skip

CASES: tuple[Case, ...] = (
    *suite_files(), *safetensors_files(), *indices(), *json_files(), *adapters(), *pictures(), *npz_files(), *rows(),
)  # fmt: skip
