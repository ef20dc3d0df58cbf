"""Write a model in the layout of its container (transformers or open_clip), load it back and compare."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from filecmp import cmp
from pathlib import Path
from typing import Any

import torch

from featcal.export.config_files import say_processor, say_tokenizer, write_model_config, write_packed_config
from featcal.export.content import StoredContent
from featcal.export.drift_picture import PICTURE_FILE
from featcal.export.kept_work import UNCHECKED, keep_work, require_checked
from featcal.family.opening import open_model
from featcal.formats.card_data import read_card_text
from featcal.formats.checkpoint import INDEX_FILE, SINGLE_FILE
from featcal.formats.contents import tensor_digests
from featcal.formats.grid import OnGrid, require_dense
from featcal.formats.hub import ADAPTERS, CARD_FILE, HEADS, RECORD_FILE
from featcal.formats.locate import locate
from featcal.formats.located_model import TEXT_CLASSES, Located, is_classifier
from featcal.formats.lora import LoraWeights
from featcal.formats.model_files import TEMPLATES
from featcal.formats.open_clip import WEIGHT_FILE
from featcal.formats.open_clip_config import CONFIG_FILE, preprocess_settings, quick_gelu
from featcal.formats.output import OutputFolder, save_tensors, save_text, stream_tensors
from featcal.formats.sentences import module_folders
from featcal.formats.tokenizers import TEXT_FILES, TOKENIZER_FILES, text_folder
from featcal.formats.weights import Stored, TensorInfo, Weights, group_by_size
from featcal.models.adapter import Adapter, Batch, Block
from featcal.models.compute import Compute
from featcal.models.families.registry import adapter_for
from featcal.models.features import final_features
from featcal.models.model import tasks_with_own_modules
from featcal.system.errors import InputError, NumericalError
from featcal.system.formatting import escape_markdown, some
from featcal.system.json_files import read_json
from featcal.system.progress import SLACK, available_bytes, rss_bytes

SHARD_BYTES = 2 * 2**30
"""Largest weight file of tensors outside blocks; a smaller model is one file."""
RELOAD_TOLERANCE = 1e-4
"""Largest difference of final features after reloading, relative to their largest value (float32)."""
LIBRARIES: Mapping[str, str] = {"hf": "transformers", "open_clip": "open_clip"}
"""Name of a layout and the library that reads it."""
_WEIGHT_SUFFIXES = {
    ".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf", ".ggml", ".ot", ".ckpt", ".tflite",
    ".npz",
}  # fmt: skip
_ABOUT_WEIGHTS = ("*.index.json", "Modelfile", "adapter_config.json")
"""Patterns of files that name weight files and so do not fit another model."""


def write_model(
    folder: OutputFolder,
    adapter: Adapter,
    container: Located,
    model: Weights,
    record: Callable[[], Mapping[str, Any]],
    card: str,
    *,
    whole: bool = True,
) -> dict[str, Any]:
    """Write `model` into the layout of the checkpoint `container`, verify it and commit the folder.

    Tensors outside the tower (text tower, projections) and all non-weight files are the container's own. A model of
    more than `SHARD_BYTES`, or one that is not verified whole, gets one file per block; blocks that `folder` holds
    already are not written again.

    Args:
        folder: may already hold files, such as `HEADS` and `PICTURE_FILE`, which stay.
        record: called after everything is written and verified, so that it can include the time.
        whole: verify by loading the folder through its own library, which takes the memory of the whole model;
            otherwise from the headers, and by outputs with one block in memory at a time.

    Returns:
        The content of `featcal.json`: the record, its notes and those on what transformers 4 cannot be told, how the
        folder was verified ("reloaded", "streamed", or None and `UNCHECKED` says why), the names of all files,
        `tensor_digests` of the weights and, where these are packed, their bytes and those of the dense ones.

    Raises:
        NumericalError: the written model differs from the one in memory; it was deleted.
        InputError: the disk refuses, or the model has maps or heads of its own, which a checkpoint of its architecture
            cannot hold.
    """
    require_weights_alone(model)
    content = StoredContent(adapter, container.open(adapter.canonical, adapter.aliases), model)
    beside = files_in(folder.model)
    written, notes = _write_files(folder, adapter, container, content, model, whole)
    unverified = _verify(folder, adapter, model, content, whole)
    hashes = tensor_digests(folder.model / name for name in sorted(written) if name.endswith(".safetensors"))
    # Asked now, so that the record can say how long writing and verifying took.
    account = dict(record())
    account["notes"] = list(dict.fromkeys([*(account.get("notes") or ()), *notes]))
    if unchecked := [*account.get(UNCHECKED, ()), *unverified]:
        account |= {UNCHECKED: unchecked, "warnings": list(dict.fromkeys([*account.get("warnings", ()), *unchecked]))}
    save_text(with_notes(card, [*account["notes"], *unchecked]), folder.model / CARD_FILE)
    account |= {
        "verified": None if unverified else "reloaded" if whole else "streamed",
        "written": sorted({*written, *beside, CARD_FILE, RECORD_FILE}),
        "tensors": hashes,
    }
    if content.is_packed:
        account["bytes"] = {
            "packed": sum(content.sizes().values()),
            "dense": sum(one.nbytes for one in content.dense.values()),
        }
    save_text(json.dumps(account, indent=2, allow_nan=False) + "\n", folder.model / RECORD_FILE)
    folder.commit()
    return account


def _verify(folder: OutputFolder, adapter: Adapter, model: Weights, content: StoredContent, whole: bool) -> list[str]:
    """Load the written model and compare it with the one in memory; return a sentence if that is not possible.

    Raises:
        NumericalError: the two differ; the written one was deleted.
    """
    unverified: list[str] = []
    try:
        with keep_work(unverified, "the written model was not compared with the one in memory", finds=True):
            back = locate(str(folder.model), Path.cwd(), "written model", unpack=True)
            own = _adapter_of(back, adapter)
            if whole:
                verify_reload(folder.model, own, model)
            else:
                verify_streamed(back.open(own.canonical, own.aliases), own, content.dense, model)
    except NumericalError:
        folder.reject()
        raise
    return unverified


def _adapter_of(written: Located, adapter: Adapter) -> Adapter:
    """Return the adapter of a written model, opened for the same purpose as `adapter`."""
    kind = adapter.reads_prompts, bool(adapter.classifier)
    return adapter_for(written.config, written.names, torch.device("cpu"), written.label, *kind)


def require_weights_alone(model: Weights) -> None:
    """Raise InputError for a model with parts that a checkpoint of its architecture cannot hold."""
    if own := tasks_with_own_modules(model):
        raise InputError(
            f"{model.label}: its adapters, maps or heads of {some(sorted(own))} have no place in a checkpoint "
            "of this architecture; name the model that they were fitted on instead (in Python its `under`)"
        )


def rewrite(source: str | Path, out: str | Path, added: Mapping[str, bytes] | None = None) -> dict[str, Any]:
    """Rewrite a model in its own layout as one verified folder of safetensors.

    A vision tower that transformers 5 saved from scratch lacks a prefix without which version 4 silently
    re-initialises every tensor; the rewritten folder loads in both. An `open_clip:ARCH:FILE` becomes a folder that
    open_clip loads by `local-dir:`.

    Args:
        added: content of further files to write, by their paths in the folder.

    Returns:
        The document of `featcal export --json`.

    Raises:
        InputError: the model lacks tensors or has others than its architecture, or it is an adapter that adds a
            classifier which the base does not have.
        UncheckedError: it is written, but could not be verified.
    """
    container = locate(str(source), Path.cwd(), "model to export")
    require_dense(container.config, container.label)
    cpu, classifies = torch.device("cpu"), container.classifies
    adapter = adapter_for(container.config, container.names, cpu, container.label, classifies=classifies)
    model = open_model(container, adapter, cpu)
    layout = container.layout
    if isinstance(model, LoraWeights):  # card and record of the base are not those of the sum
        _require_described_head(container)
        text, record = plain_card(layout), dict[str, Any]()
    else:
        text, record = carried_text(container, layout)
    if record:
        record["exported"] = layout
        record.pop(UNCHECKED, None)  # a warning keeps what was not checked then; this folder is verified anew
    with OutputFolder(out) as folder:
        carry_companions(container.folder, folder.model, record)
        _add_files(folder.model, added or {})
        content = write_model(folder, adapter, container, model, lambda: record, text)
    shown = {name: content[name] for name in ("written", "notes", UNCHECKED) if name in content}
    return require_checked({"out": str(folder.out), "format": layout, **shown})


def carried_text(container: Located, layout: str) -> tuple[str, dict[str, Any]]:
    """Return the card and the record in a model's folder, or an empty card and an empty record."""
    if not container.owns_folder:
        return plain_card(layout), {}
    record_file = container.folder / RECORD_FILE
    text = read_card_text(container.folder) or plain_card(layout)
    return text, read_json(record_file) if record_file.is_file() else {}


def plain_card(layout: str) -> str:
    """Return a card without content."""
    return f"---\nlibrary_name: {LIBRARIES[layout]}\n---\n"


def _require_described_head(container: Located) -> None:
    """Raise InputError for an adapter with a classifier of its own that the base's configuration does not describe."""
    if container.trained_for == TEXT_CLASSES and not is_classifier(container.config):
        raise InputError(
            f"{container.label}: the adapter contains a classifier, which the base's {container.config_source} does "
            "not "
            "describe; merge the adapter in the program that trained it, and export what that writes"
        )


def files_in(folder: Path) -> list[str]:
    """List all files in a folder and in those below it, by their paths in it."""
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())


def _add_files(folder: Path, added: Mapping[str, bytes]) -> None:
    """Write files into a model's folder; raise InputError if the disk is full or not writable."""
    for name, content in added.items():
        try:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
        except OSError as error:
            raise InputError(f"cannot write {folder / name}: {error.strerror}") from error


def carry_companions(source: Path, target: Path, record: Mapping[str, Any]) -> None:
    """Copy the files of single tasks that a model's record lists, and the picture of its card.

    Raises:
        InputError: a file that the record lists is missing, or the disk is full or not writable.
    """
    parts = [one for one in (HEADS, ADAPTERS) if record.get(one)]
    listed = [name for name in record.get("written") or () if str(name).partition("/")[0] in parts]
    if missing := [name for name in listed if not (source / name).is_file()]:
        raise InputError(
            f"{source}: {some(missing)} is missing, which its {RECORD_FILE} names; get the complete folder"
        )
    try:
        for part in parts:
            shutil.copytree(source / part, target / part)
        if record and (source / PICTURE_FILE).is_file():
            shutil.copyfile(source / PICTURE_FILE, target / PICTURE_FILE)
    except (OSError, shutil.Error) as error:
        raise InputError(f"cannot copy what lies beside the weights in {source} to {target}: {error}") from error


def with_notes(card: str, notes: Sequence[str]) -> str:
    """Add the notes that a card does not yet have as a list."""
    new = [f"- {note}\n" for note in map(escape_markdown, notes) if note not in card]
    return f"{card}\n## Notes\n\n{''.join(new)}" if new else card


def can_reload(info: Mapping[str, TensorInfo], limit: int | None) -> bool:
    """Say whether a written model may be loaded whole, in float32, to verify it.

    Args:
        limit: bytes of resident memory; None means the machine's free memory.
    """
    room = available_bytes() if limit is None else limit - rss_bytes()
    whole = sum(torch.Size(one.shape).numel() * (4 + one.dtype.itemsize) for one in info.values())
    return room is None or SLACK * whole < room


def verify_reload(folder: Path, adapter: Adapter, model: Weights) -> None:
    """Load `folder` with its own library and compare outputs on fixed inputs with those of `model`.

    Raises:
        NumericalError: a tensor would be re-initialised on loading, or the outputs differ.
    """
    inputs = adapter.probe()
    _compare(folder, _outputs(adapter, model, inputs), adapter.reference(folder, inputs))


def verify_streamed(written: Stored, adapter: Adapter, expected: Mapping[str, TensorInfo], model: Weights) -> None:
    """Compare a written folder with `model`, one block in memory at a time.

    Names, shapes and dtypes must be `expected`, and the shapes those of the library's own module (tied tensors once);
    then outputs on fixed inputs are compared.

    Raises:
        NumericalError: lists tensors that are missing, left over or different; or the outputs differ.
    """
    found, shapes = written.info, adapter.shapes()
    wrong = sorted(
        name
        for name in {*expected, *found, *adapter.tower}
        if found.get(name) != expected.get(name)
        or name not in found
        or shapes.get(name, found[name].shape) != found[name].shape
    )
    place = written.files[0].parent
    if wrong:
        raise NumericalError(f"{place}: written tensors are not those of the model: {', '.join(wrong[:4])}")
    inputs = adapter.probe()
    _compare(place, _outputs(adapter, model, inputs), _outputs(adapter, written, inputs))


def _write_files(
    folder: OutputFolder, adapter: Adapter, container: Located, content: StoredContent, model: Weights, whole: bool
) -> tuple[list[str], list[str]]:
    """Write everything except card and record; return names and notes."""
    if container.layout == "open_clip":
        # Weights first: open_clip makes random ones where it finds a configuration without any.
        written = [_write_single(folder, content, whole)]
        return [*written, *_write_open_clip_config(container, folder.model)], []
    # Weights last: a process that is killed leaves a folder that no library takes for a model, or this one.
    written, notes = write_beside(container, folder.model, adapter, model)
    return [*written, *_write_shards(folder, adapter, content, whole)], notes


def write_beside(container: Located, target: Path, adapter: Adapter, model: Weights) -> tuple[list[str], list[str]]:
    """Write the files of a transformers folder beside the weights; return names and notes.

    Raises:
        InputError: a file cannot be copied.
    """
    written = _copy_files(container.folder, target)
    written += say_processor(target)
    say_tokenizer(target)
    notes = [*write_model_config(target, adapter, model), *_note_text_files(container)]
    if isinstance(model, OnGrid):
        write_packed_config(target, adapter, model)
    return written, notes


def _note_text_files(container: Located) -> Iterator[str]:
    """Note the files of a tokenizer beside an adapter that are others than the base's, which are written."""
    own = text_folder(container)
    other = [
        name
        for name in TEXT_FILES
        if own != container.folder
        and (own / name).is_file()
        and not ((container.folder / name).is_file() and cmp(own / name, container.folder / name, shallow=False))
    ]
    if other:
        yield (
            f"beside the adapter lie {some(other)}, other than the base's, which were written; copy them from the "
            "adapter's folder if texts are to be read as in its training"
        )


def _outputs(adapter: Adapter, model: Weights, inputs: Batch) -> torch.Tensor:
    cpu = Compute(torch.device("cpu"), torch.float32)
    features = final_features(adapter, model, {}, [inputs], cpu)
    return adapter.output(cpu.place(model.read(adapter.scoring)), features)


def _compare(place: Path, own: torch.Tensor, theirs: torch.Tensor) -> None:
    difference = float((own - theirs).abs().max() / own.abs().max())
    # Written so that NaN fails too.
    if not difference <= RELOAD_TOLERANCE:
        raise NumericalError(f"{place}: reloaded outputs differ by {difference:.1e} of their largest value")


def _save(file: Path, content: StoredContent, names: Sequence[str], whole: bool) -> None:
    """Write one file with these stored tensors, which are in memory together only if `whole`."""
    if whole:
        save_tensors(content.read(names), file)
        return
    stream_tensors({name: content.info[name] for name in names}, content.read, file)


def _write_single(folder: OutputFolder, content: StoredContent, whole: bool) -> str:
    """Write one file with all tensors, because open_clip reads no shards."""
    _save(folder.model / WEIGHT_FILE, content, list(content.info), whole)
    return WEIGHT_FILE


def _write_shards(folder: OutputFolder, adapter: Adapter, content: StoredContent, whole: bool) -> list[str]:
    """Write one file, or one per block and as many as needed for the rest with the index last; return their names.

    A model that may not be in memory whole is written by blocks whatever its size.
    """
    sizes = content.sizes()
    if whole and sum(sizes.values()) <= SHARD_BYTES:
        save_tensors(content.read(list(sizes)), folder.model / SINGLE_FILE)
        return [SINGLE_FILE]
    blocks = [(content.stored_names(block.names), block) for block in adapter.blocks()]
    inside = {name for names, _ in blocks for name in names}
    outside = {name: size for name, size in sizes.items() if name not in inside}
    shards: list[tuple[Sequence[str], Block | None]] = [(names, None) for names in group_by_size(outside, SHARD_BYTES)]
    shards += blocks
    files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for file, (names, block) in zip(files, shards, strict=True):
        # A finished block is the file that is wanted, unless that is to be packed.
        if block is None or content.is_packed or not folder.adopt(block, file):
            _save(folder.model / file, content, names, whole or block is not None)
    places = {name: file for file, (names, _) in zip(files, shards, strict=True) for name in names}
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
    # The index names every shard, so it appears only when all of them are there.
    save_text(json.dumps(index, indent=2), folder.model / INDEX_FILE)
    return [*files, INDEX_FILE]


def _write_open_clip_config(container: Located, target: Path) -> list[str]:
    """Write `open_clip_config.json` with the activation in words, and copy the tokenizer of an open_clip folder."""
    model_cfg = {**container.config["model_cfg"], "quick_gelu": quick_gelu(container.config["model_cfg"])}
    content = {"model_cfg": model_cfg, "preprocess_cfg": preprocess_settings(container.config)}
    tokenizer = copy_tokenizer(container.folder, target) if container.owns_folder else []
    save_text(json.dumps(content, indent=2) + "\n", target / CONFIG_FILE)
    return [*tokenizer, CONFIG_FILE]


def copy_tokenizer(container: Path, target: Path) -> list[str]:
    """Copy the tokenizer files of a folder, so that transformers 4 and 5 read them; return their names."""
    copied = _copy(target, [file for file in sorted(container.iterdir()) if file.name in TOKENIZER_FILES])
    say_tokenizer(target)
    return copied


def _copy_files(container: Path, target: Path) -> list[str]:
    """Copy configuration, tokenizer, processor and every other non-weight file, the options of the modules of a
    sentence-transformers folder, and further chat templates."""
    inside = [f"{one}/config.json" for one in module_folders(container)]
    inside += [str(file.relative_to(container)) for file in sorted((container / TEMPLATES).glob("*.jinja"))]
    for name in inside:
        (target / name).parent.mkdir(exist_ok=True)
        _copy((target / name).parent, [container / name])
    return inside + _copy(
        target,
        [
            file
            for file in sorted(container.iterdir())
            if not file.is_dir()  # a link that leads nowhere is refused by the copy, not left out
            and file.name not in (RECORD_FILE, CARD_FILE, PICTURE_FILE)
            and file.suffix not in _WEIGHT_SUFFIXES
            and not any(map(file.match, _ABOUT_WEIGHTS))
            and not file.name.startswith(".")
        ],
    )


def _copy(target: Path, files: Sequence[Path]) -> list[str]:
    for file in files:
        try:
            shutil.copyfile(file, target / file.name)
        except OSError as error:
            raise InputError(f"cannot copy {file} to {target}: {error.strerror or error}") from error
    return [file.name for file in files]
