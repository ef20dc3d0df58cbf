"""Upload a written folder to the Hub: check everything first, then send exactly that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from featcal.export.card import describe_licence
from featcal.export.card_parts import load_card, save_card, with_licence
from featcal.export.licences import licence_of, licence_warnings
from featcal.formats.checkpoint import read_header, stored_names
from featcal.formats.hub import CARD_FILE, RECORD_FILE, ask, hub_model
from featcal.formats.hub_errors import Unreachable
from featcal.formats.open_clip import is_open_clip_folder, located_folder
from featcal.formats.output import PARTIAL, partial_folder
from featcal.formats.peft import CONFIG_FILE as ADAPTER_CONFIG
from featcal.formats.peft import weight_file
from featcal.system.errors import InputError
from featcal.system.formatting import some
from featcal.system.json_files import read_json

_LABEL = "folder to push"


@dataclass(frozen=True)
class UploadPlan:
    """All files and the card for a repository on the Hub, before they are sent."""

    folder: Path
    repo: str
    """Repository on the Hub, as `OWNER/NAME`."""
    files: Mapping[str, int]
    """Bytes of every file by its path in folder and repository."""
    card: str
    """The final card: the folder's own, except for a licence that was given."""
    changed: bool
    """True if that differs from the folder's card."""
    warnings: Sequence[str]

    def to_json(self) -> dict[str, Any]:
        """Return the document of `featcal push --json`, without the outcome."""
        files = [{"name": name, "bytes": size} for name, size in self.files.items()]
        return {
            "folder": str(self.folder),
            "repo": self.repo,
            "files": files,
            "card": self.card,
            "warnings": list(self.warnings),
        }


def pack(folder: Path, repo: str, licence: str | None = None) -> UploadPlan:
    """Check everything that will be sent; nothing is sent or written.

    Args:
        repo: `OWNER/NAME`.
        licence: the Hub's word for the licence, if the card states none or another one.

    Raises:
        InputError: lists all problems: no repository name, no folder, a half-written one, one without weights or card,
            or without a known licence.
    """
    folder = folder.expanduser()
    _require_finished(folder)
    problems = _find_problems(_require_repo(repo), _require_weights(folder), _require_written(folder))
    record = read_json(folder / RECORD_FILE) if (folder / RECORD_FILE).is_file() else {}
    licences = record.get("licences")
    stated = licences if isinstance(licences, dict) else {}
    try:
        card = load_card(folder)
    except InputError as error:
        raise InputError(*problems, *error.problems) from error
    if licence is not None and not licence.strip():
        problems.append("--license is empty; say one, such as --license apache-2.0")
    elif licence is not None:
        card = with_licence(card, licence, describe_licence(stated, licence))
    elif licence_of(card.data.to_dict()) is None:
        problems.append(f"{folder / CARD_FILE} states no licence; say it with --license, such as --license apache-2.0")
    if problems:
        raise InputError(*problems)
    text = str(card) if licence is not None else (folder / CARD_FILE).read_text(encoding="utf-8")
    files = {name: (folder / name).stat().st_size for name in _files_of(folder)}
    return UploadPlan(
        folder, repo, files | {CARD_FILE: len(text.encode())}, text, licence is not None, licence_warnings(stated)
    )


def push_parcel(parcel: UploadPlan, private: bool = False) -> str:
    """Send a plan as one commit; create the repository if there is none. Returns its address.

    A given licence is then written into the folder's own card too. The client of the Hub finds the token itself.

    Args:
        private: create a private repository; a public one is refused.

    Raises:
        InputError: the Hub refuses or does not answer, or the card cannot be written.
    """
    from huggingface_hub import CommitOperationAdd

    sent = {name: parcel.folder / name for name in parcel.files} | {CARD_FILE: parcel.card.encode()}
    added = [CommitOperationAdd(name, one if isinstance(one, bytes) else str(one)) for name, one in sent.items()]
    message = f"Upload {parcel.folder.resolve().name} with featcal"

    def send(api: Any) -> str:
        # None is what the account has set: a False would make public what an organisation keeps to itself.
        address = str(api.create_repo(parcel.repo, private=private or None, exist_ok=True))
        if private and not api.model_info(parcel.repo).private:
            raise InputError(
                f"'{parcel.repo}' already exists and is public; name another repository, or make it private"
            )
        api.create_commit(parcel.repo, added, commit_message=message)
        return address

    try:
        address = str(ask(parcel.repo, "model", send))
    except Unreachable as error:
        raise InputError(_refusal(parcel.repo, error)) from error
    if parcel.changed:
        save_card(parcel.folder, parcel.card)
    return address


def _refusal(repo: str, error: Unreachable) -> str:
    """Explain why the Hub refused something, and what to do."""
    cause = error.__cause__
    status = getattr(getattr(cause, "response", None), "status_code", None)
    if status in (401, 403) or type(cause).__name__ == "LocalTokenNotFoundError":
        owner = repo.partition("/")[0]
        return (
            f"the Hub does not let you write to '{repo}'; log in with `hf auth login`, or set HF_TOKEN, with a token "
            f"that may write for '{owner}'"
        )
    why = " ".join(str(cause).split())
    return f"'{repo}' was not pushed: the Hub does not answer, or refuses ({type(cause).__name__}: {why}); try again"


def _find_problems(*checks: Callable[[], object]) -> list[str]:
    """Return the problems that the checks found."""
    found: list[str] = []
    for check in checks:
        try:
            check()
        except InputError as error:
            found += error.problems
    return found


def _require_finished(folder: Path) -> None:
    """Raise InputError for a folder that does not exist or was not finished."""
    absolute = folder.absolute()
    half = next((one for one in (absolute, *absolute.parents[:1]) if one.name.endswith(PARTIAL)), None)
    if half is not None:
        raise InputError(f"{half} is incomplete; finish it with --resume or write it again, and push the result")
    if not folder.is_dir():
        beside = partial_folder(absolute)
        more = f"; {beside.name} beside it is incomplete: finish it with --resume" if beside.is_dir() else ""
        raise InputError(f"no folder {folder}{more or '; name one that featcal has written'}")


def _require_repo(repo: str) -> Callable[[], None]:
    def check() -> None:
        found = hub_model(repo)
        if found is None or found.repo != repo:
            raise InputError(f"'{repo}' is no repository on the Hub; write it as OWNER/NAME")

    return check


def _require_weights(folder: Path) -> Callable[[], object]:
    """Return the check that all weights exist, those of a model or of an adapter, with readable headers."""
    if (folder / ADAPTER_CONFIG).is_file():
        return lambda: read_header(weight_file(folder, _LABEL), _LABEL)
    if is_open_clip_folder(folder):
        return lambda: located_folder(folder, _LABEL, folder.name)
    return lambda: stored_names(folder, _LABEL)


def _require_written(folder: Path) -> Callable[[], None]:
    """Return the check that every file of the record exists."""

    def check() -> None:
        file = folder / RECORD_FILE
        named = read_json(file).get("written") if file.is_file() else None
        missing = [str(name) for name in named or () if not (folder / str(name)).is_file()]
        if missing:
            raise InputError(f"{folder}: {some(missing)} is missing, which {RECORD_FILE} names; write the folder again")

    return check


def _files_of(folder: Path) -> list[str]:
    """Return the files of a folder that the Hub's client uploads: all except those of git and of its own cache."""
    from huggingface_hub.utils import DEFAULT_IGNORE_PATTERNS, filter_repo_objects

    names = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    return list(filter_repo_objects(names, ignore_patterns=DEFAULT_IGNORE_PATTERNS))
