"""Find all obstacles between a written folder and another program, and print the next commands."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from featcal.formats.conversions import python_line
from featcal.preflight.handover.base import Base, find_base, missing_files
from featcal.preflight.handover.folder import CONFIG, Folder, Obstacle, find_strays, require_model
from featcal.preflight.handover.generation import check_generation, check_template, end_tokens, find_turns
from featcal.preflight.handover.runtimes import OLLAMA_SPLITS, OUT_TYPES, READ, TARGETS, note_unknown
from featcal.preflight.handover.sentence_modules import check_modules
from featcal.preflight.handover.tokenizer import check_against_base, check_tokenizer, ollama_reads
from featcal.preflight.handover.weights import check_dtypes, check_head, check_names, note_unmapped
from featcal.system.errors import InputError

MODELFILE = "Modelfile"
_CONVERTER = "llama.cpp/convert_hf_to_gguf.py"


@dataclass(frozen=True)
class Handover:
    """Result of the check of a folder for one program."""

    target: str
    """Program for which the folder is checked, one of `TARGETS`."""
    problems: tuple[Obstacle, ...]
    notes: tuple[str, ...]
    """Facts that may be intended, and facts that cannot be known here."""
    commands: tuple[str, ...]
    """Commands to type next: a repair if there are problems, else those of the program."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Content of files that the program needs beside the weights, by name."""

    def to_json(self) -> dict[str, Any]:
        """Return all findings as JSON, for a document."""
        return {
            "ok": not self.problems,
            "problems": [asdict(one) for one in self.problems],
            "notes": list(self.notes),
            "commands": list(self.commands),
            "files": dict(self.files),
        }


@dataclass(frozen=True)
class Checked:
    """A folder, its base and the results for every program."""

    folder: Folder
    base: Base
    handovers: tuple[Handover, ...]

    @property
    def is_ready(self) -> bool:
        """Say whether no program has a problem."""
        return not any(one.problems for one in self.handovers)

    def to_json(self) -> dict[str, Any]:
        """Return the document of `featcal check DIR --for … --json`."""
        return {
            "folder": str(self.folder.path),
            "base": self.base.ref or None,
            "compared": self.base.folder is not None,
            "ok": self.is_ready,
            "targets": {one.target: one.to_json() for one in self.handovers},
        }


def check_for(path: Path, targets: Sequence[str], base: str | Base | None = None) -> Checked:
    """Check a folder for every program. Nothing is written or fetched, and only headers of weights are read, except for
    a head that is stored although it is tied to the embedding.

    Args:
        targets: some of `TARGETS`.
        base: the base, or its reference; None means the one that record or card name.

    Raises:
        InputError: not a model's folder, or a named base that is not on this machine.
    """
    require_model(path)
    folder, found = Folder(path), base if isinstance(base, Base) else find_base(path, base)
    return Checked(folder, found, tuple(_check(folder, found, one) for one in dict.fromkeys(targets)))


def complete_folder(
    path: Path, targets: Sequence[str], out: Path, base: str | None = None
) -> tuple[dict[str, bytes], Base]:
    """Return the content of the files that a folder lacks and its base has, and for Ollama the Modelfile.

    Args:
        out: the output folder.

    Raises:
        InputError: as `check_for`; or no base is known or on this machine, and there is nothing to add without it.
    """
    require_model(path)
    found = find_base(path, base)
    if found.folder is None and "ollama" not in targets:
        raise InputError(
            f"nothing was written: what {', '.join(targets)} needs is copied from beside the base's weights, and "
            f"{'; '.join(found.notes)}"
        )
    added = {} if found.folder is None else missing_files(Folder(path), found.folder)
    if "ollama" in targets:
        added[MODELFILE] = write_modelfile(Folder(path, added), ".", _name(out)).encode()
    return added, found


def _check(folder: Folder, base: Base, target: str) -> Handover:
    checks: Mapping[str, Callable[[], Iterator[Obstacle]]] = {
        "sentence-transformers": lambda: check_modules(folder),
    }
    problems = [
        *_check_whole(folder, target),
        *(checks[target]() if target in checks else _check_text(folder, base, target)),
    ]
    if base.folder is not None and target in checks and any(folder.has(one) for one in ("tokenizer.json", "vocab.txt")):
        problems += check_against_base(folder, base.folder)
    notes = [*_note(folder, target), *base.notes]
    files = {}
    commands = _repair(folder, base, target, problems) if problems else _NEXT[target](folder)
    if target == "ollama" and not problems and not folder.has(MODELFILE):
        out = _export_place(folder, target)
        files[MODELFILE] = write_modelfile(folder, ".", _name(out))
        commands = [_export_command(folder, base, target), *_next_ollama(folder, out)]
    return Handover(target, tuple(problems), tuple(notes), tuple(commands), files)


def _check_whole(folder: Folder, target: str) -> Iterator[Obstacle]:
    """Yield problems for any program."""
    yield from find_strays(folder.path)
    yield from folder.headers[1]
    if not folder.model_class:
        yield Obstacle(
            "configuration",
            f"{CONFIG} is missing, cannot be read or names no 'architectures', by which programs choose the model's "
            "code; copy the list from the base's",
        )
    yield from check_names(folder)
    if target != "sentence-transformers":
        yield from check_dtypes(folder, target)
        yield from check_head(folder)


def _check_text(folder: Folder, base: Base, target: str) -> Iterator[Obstacle]:
    """Yield problems of the files with which a program reads and writes text."""
    yield from check_tokenizer(folder, target)
    if base.folder is not None:
        yield from check_against_base(folder, base.folder)
    yield from check_generation(folder, base.folder)
    yield from check_template(folder, base.folder)


def _note(folder: Folder, target: str) -> Iterator[str]:
    """Yield notes on a folder for a program."""
    own, named = folder.support, folder.model_class
    if target == "gguf":
        if named and not own.gguf:
            yield note_unknown(target, named)
        yield from note_unmapped(folder)
    if target == "vllm":
        if named and not own.vllm:
            more = "it may run through vLLM's Transformers backend: --model-impl transformers"
            yield f"{note_unknown(target, named)}; {more}"
        if folder.dtype == "F32":
            yield "the weights are float32, which vLLM by itself rounds to half precision; --dtype float32 keeps them"
    if target == "ollama" and named and not own.ollama:
        yield f"{note_unknown(target, named)}, so the way leads over GGUF"
    elif target == "ollama" and named and not ollama_reads(folder):
        yield (
            "ollama create would take its default rules for cutting text, since it knows those of "
            f"{', '.join(OLLAMA_SPLITS.values())} alone (as read in {READ}), so the way leads over GGUF"
        )
    if target != "sentence-transformers" and folder.generates and folder.template is None:
        yield "there is no chat template: the model continues texts, and chat has no turns"


def _repair(folder: Folder, base: Base, target: str, problems: Sequence[Obstacle]) -> list[str]:
    """Return the command that copies missing files, if it is known to help."""
    copies = {name for one in problems for name in one.copies}
    if base.folder is None or not copies & missing_files(folder, base.folder).keys():
        return []
    return [_export_command(folder, base, target)]


def _export_place(folder: Folder, target: str) -> Path:
    """Return the output folder of an export with all files."""
    path = folder.path
    if path.name in ("", ".."):  # "." and ".." do not say what the folder is called
        path = path / ".." / path.resolve().name
    return path.with_name(f"{path.name}-{target}")


def _export_command(folder: Folder, base: Base, target: str) -> str:
    """Return the command that exports a folder with all files."""
    named = ["--base", base.ref] if base.is_named else []
    out = str(_export_place(folder, target))
    return shlex.join(["featcal", "export", str(folder.path), "--for", target, *named, "--out", out])


def _name(path: Path) -> str:
    """Return a name for a file or a model of another program, derived from a folder's."""
    return re.sub(r"[^a-z0-9.-]+", "-", path.resolve().name.lower()).strip("-.") or "model"


def _convert(folder: Folder, path: Path, out: str) -> list[str]:
    """Return the commands that convert a folder, or one with the same weights at `path`."""
    kind = OUT_TYPES.get(folder.dtype, "auto")
    return [
        "git clone --depth 1 https://github.com/ggml-org/llama.cpp",
        "pip install -r llama.cpp/requirements/requirements-convert_hf_to_gguf.txt",
        shlex.join(["python", _CONVERTER, str(path), "--outtype", kind, "--outfile", out]),
    ]


def _next_gguf(folder: Folder) -> list[str]:
    name = _name(folder.path)
    whole, packed = f"{name}-{OUT_TYPES.get(folder.dtype, 'f16')}.gguf", f"{name}-Q4_K_M.gguf"
    return [
        *_convert(folder, folder.path, whole),
        shlex.join(["llama-quantize", whole, packed, "Q4_K_M"]),
        shlex.join(
            ["llama-cli", "-m", packed] if folder.generates else ["llama-embedding", "-m", packed, "-p", "A text."]
        ),
    ]


def _next_vllm(folder: Folder) -> list[str]:
    return [shlex.join(["vllm", "serve", str(folder.path), *(() if folder.generates else ("--runner", "pooling"))])]


def _next_ollama(folder: Folder, exported: Path | None = None) -> list[str]:
    """Return the commands after which the model answers, for a folder with a Modelfile or for its export."""
    path = exported or folder.path
    name, file = _name(path), path / MODELFILE
    first = [] if _reads_folder(folder) else _convert(folder, path, str(path / f"{name}.gguf"))
    asked = json.dumps({"model": name, "input": "A text."})
    last = ["ollama", "run", name] if folder.generates else ["curl", "http://localhost:11434/api/embed", "-d", asked]
    return [*first, shlex.join(["ollama", "create", name, "-f", str(file)]), shlex.join(last)]


def _next_sentences(folder: Folder) -> list[str]:
    code = (
        f"from sentence_transformers import SentenceTransformer as S; print(S({str(folder.path)!r}).encode('A text.'))"
    )
    return [python_line(code)]


_NEXT: Mapping[str, Callable[[Folder], list[str]]] = dict(
    zip(TARGETS, (_next_gguf, _next_vllm, _next_ollama, _next_sentences), strict=True)
)
"""Commands for a folder without problems, by target."""


def _reads_folder(folder: Folder) -> bool:
    """Say whether `ollama create` is known to convert the folder itself."""
    return folder.support.ollama and ollama_reads(folder)


def write_modelfile(folder: Folder, source: str, name: str) -> str:
    """Return the Modelfile for a folder: the weights, the chat template in Go's syntax and the stop texts.

    A template that does more than mark turns is not translated: a comment says so, and what to do.

    Args:
        source: the folder's name in the Modelfile.
        name: name of a GGUF file in it, without its ending.
    """
    weights = source if _reads_folder(folder) else f"{source}/{name}.gguf"
    lines = [f"FROM {weights}"]
    turns = find_turns(folder)
    template = None if turns is None else turns.to_go()
    if template is not None:
        lines.append(f'TEMPLATE """{template}"""')
    elif folder.template is not None:
        lines += [
            "# The chat template does more than mark turns, so it was not turned into Go's syntax. Ollama finds that",
            "# of a known model by itself (see ollama show --template); else write TEMPLATE by hand.",
        ]
    stops = (one.replace("\\", "\\\\").replace('"', '\\"') for one in end_tokens(folder))
    lines += [f'PARAMETER stop "{one}"' for one in stops]
    return "\n".join(lines) + "\n"
