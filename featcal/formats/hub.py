"""Find and fetch models on the Hub, and explain its errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from featcal.formats.hub_errors import Unreachable, causes, find_trouble, limit_waits, try_again
from featcal.system.atomic_files import put
from featcal.system.errors import InputError
from featcal.system.formatting import did_you_mean, printable, some
from featcal.system.json_files import read_json

HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.tiktoken"]
"""Patterns of the files of a model on the Hub with safetensors."""
PICKLES = ["pytorch_model*.bin", "adapter_model.bin", "open_clip_pytorch_model.bin"]
"""Patterns of the weight files of a model without safetensors."""
CARD_FILE = "README.md"
"""A model's card; it is fetched for the licence."""
RECIPE_FILE = "mergekit_config.yml"
"""The configuration that mergekit writes beside a merge; it is fetched for the names of the models."""
RECORD_FILE = "featcal.json"
"""The record that featcal writes beside a model."""
HEADS, ADAPTERS = "heads", "adapters"
"""Folders that featcal writes beside the weights, with one entry per task; also their keys in a record."""
_OWNERS = {
    "openai-community": ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"),
    "FacebookAI": ("roberta-base", "roberta-large", "xlm-roberta-base", "xlm-roberta-large"),
    "google-bert": ("bert-base-uncased", "bert-base-cased", "bert-large-uncased", "bert-large-cased"),
    "google-t5": ("t5-small", "t5-base", "t5-large", "t5-3b", "t5-11b"),
    "distilbert": ("distilgpt2", "distilroberta-base"),
}  # fmt: skip
_WITHOUT_OWNER = {name: f"{owner}/{name}" for owner, names in _OWNERS.items() for name in names}
"""Models that older files call by a name alone → their ids on the Hub, which still answers to the old ones."""
_COMMIT = 40
"""Pattern of a commit: its hexadecimal digits."""
_PART = r"(?!\.+(?:[/@]|$))[\w.-]+"
"""Pattern of a name between two slashes, other than `.` and `..`."""
_ID = re.compile(rf"(?P<repo>[\w-][\w.-]*/{_PART})(?:/(?P<folder>{_PART}(?:/{_PART})*))?(?:@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True)
class HubModel:
    """A model on the Hub: a whole repository, or a folder inside it."""

    ref: str
    """The reference as it was given."""
    repo: str
    """Repository on the Hub, as `OWNER/NAME`."""
    folder: str
    """Path after the second slash; empty if the model is the whole repository."""
    revision: str | None

    @property
    def patterns(self) -> dict[str, list[str]]:
        """Return the files to fetch, the model's folder and those below it, as arguments of the Hub's client."""
        return {
            "allow_patterns": [self.path(pattern) for pattern in (*HUB_FILES, CARD_FILE, RECIPE_FILE)],
            # Weights in folders below are other models, but for `task_patterns`.
            "ignore_patterns": [self.path("*/*.safetensors")],
        }

    @property
    def task_patterns(self) -> list[str]:
        """Return the files of single tasks to fetch, besides a record of featcal."""
        return [self.path(f"{part}/*.safetensors") for part in (HEADS, ADAPTERS)]

    @property
    def pickle_patterns(self) -> dict[str, list[str]]:
        """Return the weights to fetch if there are no safetensors, as arguments of the Hub's client."""
        return {
            "allow_patterns": [self.path(pattern) for pattern in PICKLES],
            "ignore_patterns": [self.path("*/*")],
        }

    def path(self, name: str) -> str:
        """Return the name of one of the model's files in its repository."""
        return f"{self.folder}/{name}" if self.folder else name

    def select_files(self, files: Iterable[str]) -> list[str]:
        """Return the repository's files inside the model's folder, relative to it.

        >>> hub_model("owner/name/a").select_files(["a/config.json", "a/b/config.json", "ab/config.json"])
        ['config.json', 'b/config.json']
        """
        start = self.path("")
        return [file.removeprefix(start) for file in files if file.startswith(start)]

    def other_folders(self, files: Iterable[str]) -> str:
        """Return words for a message that name the repository's other folders with models, those inside this one first.

        Args:
            files: all files of the repository.
        """
        found = {file.rpartition("/")[0] for file in files if file.endswith(".safetensors")} - {"", self.folder}
        nearest = sorted(found, key=lambda one: (not one.startswith(self.path("")), one))
        if not nearest:
            return ""
        return f"; its folders with safetensors are {some(nearest, 24)}.{did_you_mean(self.folder, nearest)}"


def hub_model(ref: str) -> HubModel | None:
    """Parse `OWNER/NAME[/FOLDER][@REVISION]`, or the old name of a well-known model; None for a text of another form.

    >>> hub_model("owner/name/sub/folder@v1").folder, hub_model("owner/name/../x"), hub_model("gpt2").repo
    ('sub/folder', None, 'openai-community/gpt2')
    """
    name, at, revision = ref.partition("@")
    found = _ID.fullmatch(f"{_WITHOUT_OWNER.get(name, name)}{at}{revision}")
    return found and HubModel(ref, found["repo"], found["folder"] or "", found["revision"])


def snapshot(model: HubModel, local_files_only: bool = False) -> Path:
    """Return the folder of a model in the Hub's cache, after fetching missing files unless `local_files_only`.

    The folder does not exist if the repository has none of its name, and may lack files if the Hub was not asked.

    Raises:
        OSError: any error of the Hub's client, except an id that it refuses.
        HFValidationError: an id that the client refuses.
    """
    from huggingface_hub import snapshot_download

    with bar_of(model.ref) as bar:
        fetch = partial(
            snapshot_download,
            model.repo,
            revision=model.revision,
            local_files_only=local_files_only,
            tqdm_class=bar,
        )
        folder = Path(fetch(**model.patterns)) / model.folder
        if folder.is_dir() and not any(folder.glob("*.safetensors")):
            fetch(**model.pickle_patterns)
        if _has_tasks(folder / RECORD_FILE):
            fetch(allow_patterns=model.task_patterns)
    return folder


@contextmanager
def bar_of(ref: str) -> Iterator[type[tqdm]]:
    """Return the class of progress bars for one fetch inside the `with`: of the client's bars only the bar of bytes
    is shown, on a terminal, if the fetch takes longer than a moment.
    """
    made: list[tqdm] = []

    class Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
        def __init__(self, *args: Any, **options: Any) -> None:
            # Others count files, and compressed bytes on their way.
            shown = options.get("unit") == "B" and not str(options.get("desc")).startswith("Downloading")
            given = {name: options[name] for name in ("iterable", "total", "initial", "unit") if name in options}
            super().__init__(
                *args,
                **given,
                desc=f"fetching {printable(ref)}",
                unit_scale=True,
                delay=1,
                leave=False,
                disable=None if shown else True,
            )
            made.append(self)

        def refresh(self, *args: Any, **options: Any) -> None:
            """Draw the bar, unless it has just begun: the client calls this immediately."""
            if not self.disable and self._time() >= self.start_t + self.delay:
                super().refresh(*args, **options)

        def set_description(self, desc: str | None = None, refresh: bool | None = True) -> None:
            """Keep the description."""

    try:
        yield Bar
    finally:
        for bar in made:  # the client leaves them open, and the next one would stand a line below
            bar.close()


def cached_commit(repo: str, revision: str | None, kind: str = "model") -> str | None:
    """Return the commit of a revision of a "model" or "dataset" in the Hub's cache, None if it was not fetched; a
    later fetch may change it unless the revision is a commit.
    """
    if (file := _reference_file(repo, revision, kind)) is None:
        return revision
    try:
        with file.open(encoding="ascii") as reference:
            return reference.read(_COMMIT)
    except (OSError, ValueError):
        return None


def keep_commit(repo: str, revision: str | None, commit: str, kind: str = "model") -> None:
    """Write the commit of a revision into the Hub's cache, as its client does with fetched files.

    Raises:
        OSError: the cache cannot be written.
    """
    if (file := _reference_file(repo, revision, kind)) is not None and cached_commit(repo, revision, kind) != commit:
        file.parent.mkdir(parents=True, exist_ok=True)
        put(file, commit)


def _reference_file(repo: str, revision: str | None, kind: str) -> Path | None:
    """Return the file of the Hub's cache with the commit of a revision; None for a commit."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import REGEX_COMMIT_HASH, repo_folder_name

    named = revision or constants.DEFAULT_REVISION
    if REGEX_COMMIT_HASH.fullmatch(named):
        return None
    return Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repo, repo_type=kind), "refs", named)


def _has_tasks(record: Path) -> bool:
    """Say whether a record, if there is one, lists files of single tasks."""
    try:
        found = read_json(record) if record.is_file() else {}
    except InputError:  # said by whoever needs the record
        return False
    return any(found.get(part) for part in (HEADS, ADAPTERS))


def fetch_model(model: HubModel) -> Path:
    """Fetch a model's files from the Hub and return its folder in the cache.

    Raises:
        InputError: neither the Hub nor the cache has it, its id is invalid, or the download fails.
    """
    with explain_hub_errors(model.ref):
        place = try_again(lambda: snapshot(model))
        if place.is_dir():
            return place
        files = look_up(model.ref, "model", lambda api: api.list_repo_files(model.repo, revision=model.revision))
    raise InputError(no_such_folder(model, files))


def no_such_folder(model: HubModel, files: Iterable[str]) -> str:
    """Return the message for a folder that a repository with these files does not have."""
    return f"'{model.repo}' on the Hub has no folder '{model.folder}'{model.other_folders(files)}"


def look_up(ref: str, kind: str, question: Callable[[Any], Any]) -> Any:
    """Return the Hub's answer to a read-only request, with retries after temporary failures; see `ask`."""
    return ask(ref, kind, lambda api: try_again(lambda: question(api)))


def ask(ref: str, kind: str, question: Callable[[Any], Any]) -> Any:
    """Return the Hub's answer to a request about a "model" or "data set".

    Args:
        question: called with the Hub's client.

    Raises:
        InputError: the model or data set does not exist, or cannot be read.
        Unreachable: the Hub does not answer.
    """
    import huggingface_hub

    limit_waits()
    try:
        return question(huggingface_hub.HfApi())
    except Exception as error:  # the clients' own transports have errors of many kinds
        if problem := _explain_answer(error, ref, kind):
            raise InputError(problem) from error
        if trouble := find_trouble(error):
            raise Unreachable(trouble) from error
        raise


@contextmanager
def explain_hub_errors(ref: str, kind: str = "model") -> Iterator[None]:
    """Turn errors of the Hub's clients in the body of the `with` into one sentence.

    Raises:
        InputError: a part of `ref` is not available; the message says which, why, and what to do.
    """
    limit_waits()
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # the clients' own transports have errors of many kinds
        if problem := _explain_answer(error, ref, kind):
            raise InputError(problem) from error
        if trouble := find_trouble(error):
            raise InputError(f"'{ref}' cannot be fetched: the Hub {trouble.why}; {trouble.remedy}") from error
        raise


def _explain_answer(error: Exception, ref: str, kind: str) -> str:
    """Explain an answer of the Hub about `owner/name[/folder][@revision]` and what to do; "" if there is nothing to
    explain."""
    from huggingface_hub import errors, get_token

    named, _, revision = ref.partition("@")
    repo = "/".join(named.split("/")[:2])
    for one in causes(error):
        match one:
            case errors.GatedRepoError() if get_token() is None:
                return f"'{repo}' is gated; accept its licence on the Hub and set HF_TOKEN"
            case errors.GatedRepoError():
                return f"'{repo}' is gated, and the account of your token has no access; ask for it on its page"
            case errors.RepositoryNotFoundError():
                whose = "HF_TOKEN" if get_token() is None else "a token that may read them"
                return f"the Hub has no {kind} '{repo}' (private ones need {whose})"
            case errors.RevisionNotFoundError():
                return f"'{repo}' has no revision '{revision}' on the Hub; give one of its commits, tags or branches"
            case errors.HFValidationError():
                return f"'{ref}' is no id that the Hub has: {' '.join(str(one).split())}"
            case errors.LocalEntryNotFoundError():  # what is not in the cache is no answer of the Hub
                continue
            case errors.EntryNotFoundError() | errors.SafetensorsParsingError():
                return f"'{ref}' on the Hub cannot be read: {' '.join(str(one).split())}"
    return ""
