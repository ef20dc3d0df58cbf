"""Find the base of a written folder on this machine, and the files beside its weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from featcal.authoring.ancestors import find_folder
from featcal.authoring.from_merge import find_origins
from featcal.formats.card_data import read_card_data
from featcal.formats.checkpoint import local_folder
from featcal.formats.hub import RECORD_FILE, hub_model
from featcal.formats.sentences import LENGTH_FILE, MODULES_FILE, PROMPTS_FILE
from featcal.formats.tokenizers import TOKENIZER_FILES
from featcal.preflight.handover.folder import GENERATION, OLD_TEMPLATE, TEMPLATE, Folder
from featcal.preflight.handover.sentence_modules import read_modules
from featcal.preflight.handover.tokenizer import compare_with_base
from featcal.suite.schema import load_suite
from featcal.system.errors import InputError
from featcal.system.json_files import read_json

_BESIDE = (
    *TOKENIZER_FILES,
    GENERATION,
    TEMPLATE,
    OLD_TEMPLATE,
    MODULES_FILE,
    LENGTH_FILE,
    PROMPTS_FILE,
)
"""Files beside the weights that belong to a text model and that merging does not change."""

_OF_MODULES = ("config.json", "model.safetensors")
"""Files in the folder of a module of sentence-transformers."""


@dataclass(frozen=True)
class Base:
    """The base of a folder, as far as it was found."""

    ref: str
    """Reference of the base; "" if nothing names it."""
    folder: Folder | None
    """None if it is not on this machine."""
    is_named: bool = False
    """True if the caller named it: commands must then name it too."""

    @property
    def notes(self) -> Iterator[str]:
        """Yield notes on a base that could not be compared."""
        if not self.ref:
            yield "nothing says which base this was made from, so nothing was compared with it; name it with --base"
        elif self.folder is None:
            yield (
                f"the base {self.ref} is not on this machine, so nothing was compared with it; fetch what lies "
                f"beside its weights: {fetch_command(self.ref)}"
            )


def find_base(path: Path, named: str | None) -> Base:
    """Find the base of a folder: the named one, else that of the suite in its record, else that of the recipe or the
    card beside its weights; nothing is fetched.

    Raises:
        InputError: the named one is neither a folder nor in the Hub's local cache.
    """
    if named is not None:
        found = find_folder(named, Path.cwd())
        if found is None and hub_model(named) is not None:
            raise InputError(f"base: '{named}' is not on this machine; fetch it first: {fetch_command(named)}")
        return Base(
            named, Folder(found if found is not None else local_folder(named, Path.cwd(), "base")), is_named=True
        )
    for ref, root in _references(path):
        found = find_folder(ref, root)
        return Base(ref, None if found is None else Folder(found))
    return Base("", None)


def fetch_command(ref: str) -> str:
    """Return the command that fetches a model from the Hub without its weights."""
    model = hub_model(ref)
    if model is None:
        return f"give its folder with --base ({ref})"
    revision = f" --revision {model.revision}" if model.revision else ""
    return f"hf download {model.repo}{revision} --exclude '*.safetensors' '*.bin' '*.gguf' '*.pth'"


def missing_files(folder: Folder, base: Folder) -> dict[str, bytes]:
    """Return the content of every file beside the base's weights that the folder lacks, and the chat template if the
    base stores it elsewhere.

    Tokenizer files belong together: if the folder has its own vocabulary, only files that match it are added.
    """
    names = [name for name in _BESIDE if base.has(name) and not folder.has(name)]
    other = compare_with_base(folder, base)
    if other is not None and other.changed:
        names = [name for name in names if name not in TOKENIZER_FILES]
    if folder.template is not None:
        names = [name for name in names if name not in (TEMPLATE, OLD_TEMPLATE)]
    found = {name: content for name in names if (content := base.read(name)) is not None}
    whole = Folder(folder.path, found)
    if base.has(MODULES_FILE) and whole.read(MODULES_FILE) == base.read(MODULES_FILE):
        inside = [f"{place}/{name}" for _, place in read_modules(base) if place for name in _OF_MODULES]
        found |= {name: content for name in inside if not whole.has(name) and (content := base.read(name)) is not None}
    if isinstance(base.template, str) and Folder(folder.path, found).template is None:
        found[TEMPLATE] = base.template.encode()
    return found


def _references(path: Path) -> Iterator[tuple[str, Path]]:
    """Yield references of the base that the folder itself names, with the folder that they are relative to."""
    record = path / RECORD_FILE
    if record.is_file():
        stated = read_json(record).get("suite_file")
        shipped = stated.get("shipped") if isinstance(stated, dict) else None
        if isinstance(shipped, str):
            with suppress(InputError):  # of another version, whose suite has gone
                suite = load_suite(shipped)
                yield suite.origin, suite.root
    with suppress(InputError):
        found = find_origins(path, None, {}).base
        if found is not None:
            yield found, Path.cwd()
    stated = read_card_data(path).get("base_model")
    models = stated if isinstance(stated, list) else [stated]
    # Of several, nothing says which is the base of a merge that others made.
    if len(models) == 1 and isinstance(models[0], str):
        yield models[0], Path.cwd()
