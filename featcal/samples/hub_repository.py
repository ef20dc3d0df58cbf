"""Find the files of a Hub data set's splits as `datasets` does, from their names alone."""

from __future__ import annotations

import copy
import glob
import json
import re
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache, lru_cache, partial
from pathlib import Path, PurePosixPath
from typing import Any

from featcal.formats.hub import bar_of, cached_commit, explain_hub_errors, keep_commit, look_up
from featcal.formats.hub_errors import Unreachable, try_again
from featcal.system.atomic_files import put
from featcal.system.errors import InputError
from featcal.system.extras import require_packages
from featcal.system.formatting import did_you_mean, some
from featcal.system.json_files import read_json

CARD, SETTINGS, INFOS = "README.md", ".huggingface.yaml", "dataset_infos.json"
"""Files that describe how to read the others: the card, the settings that may accompany it, and older information
files."""
ALONE = "-alone"
"""Suffix of a split's prepared files in the cache of `datasets`, if it is prepared by itself."""
_MOST_FILES = 20_000
"""Most files of a repository for which featcal determines the layout."""
_ELSEWHERE = re.compile(r"^[\s-]*(?:\w+:)?\s*['\"]?(?:hf|https?)://", re.MULTILINE)
"""Pattern of an address in a card, which may be one of files in another place."""
_OF_THEIR_OWN = ("parquet", "arrow", "webdataset")
"""Formats whose files contain the types of their columns."""
_OF_THE_CARD = ("json", "csv", "text")
"""Formats whose types `datasets` takes from the first split, unless the card gives them."""

_asked: set[tuple[str, str | None, str]] = set()
"""Cache, in this process, of names and revisions with their commits."""


@dataclass(frozen=True)
class Repository:
    """A data set on the Hub at one commit, as far as it is known without its data."""

    name: str
    commit: str
    sizes: Mapping[str, int]
    """Bytes of every file."""
    texts: Mapping[str, str]
    """Content of the files that describe how to read others, as far as it is known."""

    def __hash__(self) -> int:
        return hash((self.name, self.commit))

    @property
    def ref(self) -> str:
        return f"{self.name}@{self.commit}"

    @property
    def folder(self) -> Path:
        """Return the folder beside the cache of `datasets` for files of this commit."""
        return _commit_folder(self.name, self.commit)

    @lru_cache(maxsize=256)  # noqa: B019  # it is asked for at every look at a source, and a card takes long to read
    def lay_out(self, config: str | None) -> DatasetLayout | None:
        """Return how `datasets` would read a configuration; None if names do not determine that.

        Raises:
            InputError: it cannot read it: there is a loading script, no data file, or no such configuration.
        """
        script = f"{self.name.rpartition('/')[2]}.py"
        if script in self.sizes:
            raise InputError(
                f"data set '{self.name}' is read by a script of its own ({script}), which `datasets` does not run any "
                "more; take a copy in files of data, or the Hub's own by `revision: refs/convert/parquet`"
            )
        unknown = SETTINGS in self.sizes and SETTINGS not in self.texts
        if unknown or len(self.sizes) > _MOST_FILES or _ELSEWHERE.search(self.texts.get(CARD, "")):
            return None
        with tempfile.TemporaryDirectory() as folder:
            top = Path(folder).resolve() / "data-set"
            try:
                self._write_names(top)
                with hide_bars(self.name):
                    return self._ask_datasets(top, config)
            except (OSError, ValueError, RuntimeError, zipfile.BadZipFile):  # names that the contents explain
                return None

    def _write_names(self, top: Path) -> None:
        for name in self.sizes:
            path = PurePosixPath(name)
            if not path.is_absolute() and ".." not in path.parts:
                (top / path).parent.mkdir(parents=True, exist_ok=True)
                (top / path).write_text(self.texts.get(name, ""), encoding="utf-8")

    def _ask_datasets(self, top: Path, config: str | None) -> DatasetLayout:
        datasets = import_datasets(self.name)
        try:
            configs = datasets.get_dataset_config_names(str(top))
        except (datasets.data_files.EmptyDatasetError, datasets.exceptions.DataFilesNotFoundError) as error:
            raise InputError(f"data set '{self.name}' has no files that `datasets` reads") from error
        chosen = config or datasets.get_dataset_default_config_name(str(top))
        if chosen not in configs:
            asked = f"has no configuration '{config}'" if config else "has several configurations; give one as 'config'"
            hint = did_you_mean(config, configs) if config else ""
            raise InputError(f"data set '{self.name}' {asked} (configurations: {some(configs, 24)}).{hint}")
        builder = datasets.load_dataset_builder(str(top), name=config, cache_dir=str(top.parent / "cache"))
        splits = {
            str(split): tuple(Path(file).relative_to(top).as_posix() for file in files)
            for split, files in (builder.config.data_files or {}).items()
        }
        return DatasetLayout(self, builder, splits)


@dataclass(frozen=True)
class DatasetLayout:
    """One configuration of a data set, in the view of `datasets`."""

    repository: Repository
    builder: Any
    """The builder of `datasets`; its files are empty."""
    splits: Mapping[str, tuple[str, ...]]
    """Files of every split."""

    @property
    def columns(self) -> tuple[str, ...] | None:
        """Return the columns that the card lists; None if it lists none."""
        features = self.builder.info.features
        return None if features is None or INFOS in self.repository.sizes else tuple(features)

    @property
    def parts(self) -> bool:
        """Say whether a split can be read without the others, with the same result."""
        known = self.builder.info.features is not None
        return self.builder.name in _OF_THEIR_OWN or (known and self.builder.name in _OF_THE_CARD)

    def splits_of(self, asked: str) -> list[str]:
        """Return the splits in an expression of `datasets`, such as `train[:100]+test`.

        Raises:
            InputError: there is no such split.
        """
        if asked == "all" and asked not in self.splits:
            return list(self.splits)
        names = [part.strip().partition("[")[0] for part in asked.split("+")]
        for name in names:
            if name not in self.splits:
                of = f", configuration '{self.builder.config.name}'," if self.builder.config.name != "default" else ""
                raise InputError(
                    f"data set '{self.repository.name}'{of} has no split '{name}' (splits: "
                    f"{some(list(self.splits), 24)}).{did_you_mean(name, list(self.splits))}"
                )
        return list(dict.fromkeys(names))

    def files_of(self, asked: str) -> list[str]:
        """Return the files that a split needs: its own, or those of all splits if it cannot be read by itself."""
        names = self.splits_of(asked) if self.parts else list(self.splits)
        return list(dict.fromkeys(file for name in names for file in self.splits[name]))

    def copied_bytes(self, asked: str) -> int:
        """Return the bytes that `datasets` writes for these files: as the card states, else as many as are fetched."""
        names = self.splits_of(asked) if self.parts else list(self.splits)
        sizes = [int(getattr((self.builder.info.splits or {}).get(name), "num_bytes", None) or 0) for name in names]
        return sum(sizes) if all(sizes) else sum(self.repository.sizes[file] for file in self.files_of(asked))

    @property
    def is_prepared_whole(self) -> bool:
        """Say whether `datasets` has all splits of this commit in its cache."""
        prepared = cache_folder_of(self.repository.name) / self.builder.config.name
        return any(prepared.glob(f"*/{self.repository.commit}/dataset_info.json"))

    def is_prepared(self, asked: str) -> bool:
        """Say whether a split can be read without a download."""
        alone = self.parts and (Path(self.part(asked).cache_dir) / "dataset_info.json").is_file()
        return alone or self.is_prepared_whole

    def prepare(self, asked: str) -> Any:
        """Return a split opened by `datasets`, after fetching and preparing only what it needs."""
        builder = self.part(asked)
        with self.fetch_files(asked):
            # What a card says of numbers and hashes is of all splits.
            builder.download_and_prepare(verification_mode="no_checks")
        return builder.as_dataset(asked)

    @contextmanager
    def fetch_files(self, asked: str) -> Iterator[None]:
        """Fetch the files of a split, unless it is prepared, for the body of the `with`, which lets `datasets` prepare
        them; one progress bar covers both."""
        from huggingface_hub import snapshot_download

        of = self.repository
        with bar_of(f"{of.name} ({asked})") as bar, hide_bars(of.name):
            if not self.is_prepared(asked):
                fetch = partial(snapshot_download, of.name, repo_type="dataset", revision=of.commit, tqdm_class=bar)
                try_again(lambda: fetch(allow_patterns=[glob.escape(file) for file in self.files_of(asked)]))
            yield

    def part(self, asked: str) -> Any:
        """Return a builder of `datasets` for one split by itself."""
        of = self.repository
        data_files = import_datasets(of.name).data_files
        names = self.splits_of(asked)
        files = {
            name: data_files.DataFilesList(
                [f"hf://datasets/{of.name}@{of.commit}/{file}" for file in self.splits[name]], [(of.name, of.commit)]
            )
            for name in names
        }
        info = copy.deepcopy(self.builder.info)
        # Those are of all splits.
        info.splits = info.download_checksums = info.download_size = info.dataset_size = info.size_in_bytes = None
        return type(self.builder)(
            repo_id=of.name,
            dataset_name=of.name.rpartition("/")[2],
            config_name=self.builder.config.name,
            config_id=f"{self.builder.config.name}-{'-'.join(names)}{ALONE}",
            data_files=data_files.DataFilesDict(files),
            hash=of.commit,
            info=info,
        )


def import_datasets(name: str) -> Any:
    """Return the package `datasets`; InputError, with the name of a data set, if it is not installed."""
    require_packages("datasets", label=f"data set '{name}'")
    import datasets

    return datasets


@contextmanager
def hide_bars(name: str) -> Iterator[None]:
    """Hide the progress bars of `datasets` in the body of the `with`, which reads the data set `name`."""
    datasets = import_datasets(name)
    hidden = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not hidden:
            datasets.enable_progress_bars()


@contextmanager
def explain_reading(ref: str, where: str) -> Iterator[None]:
    """Turn failures in the body of the `with`, on the Hub or in `datasets`, into one sentence.

    Args:
        ref: the data set, and its revision if one was asked for.
        where: names the data in messages.

    Raises:
        InputError: names the missing part, the reason and the remedy.
    """
    datasets = import_datasets(ref)
    try:
        with explain_hub_errors(ref, "data set"):
            yield
    except (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError) as error:
        reason = next(iter(str(error).splitlines()), "no reason given")
        raise InputError(f"{where} cannot be loaded ({type(error).__name__}: {reason})") from error


def describe_repository(name: str, revision: str | None) -> Repository:
    """Ask the Hub, in one request, for a data set's files and card.

    Raises:
        InputError: there is no such data set or revision, or it is gated.
        Unreachable: the Hub does not answer.
    """
    ref = f"{name}@{revision}" if revision else name
    info = look_up(ref, "data set", lambda api: api.dataset_info(name, revision=revision, files_metadata=True))
    if info.gated:
        # Gated data sets answer with sizes to everybody; this asks whether this user may fetch them.
        look_up(ref, "data set", lambda api: api.auth_check(name, repo_type="dataset"))
    sizes = {one.rfilename: one.size or 0 for one in info.siblings or ()}
    card = info.card_data.to_yaml() if info.card_data is not None else ""
    return Repository(name, info.sha, sizes, {CARD: f"---\n{card}\n---\n"} if CARD in sizes and card else {})


def known_repository(name: str, revision: str | None) -> Repository | None:
    """Return the stored description of a data set from its download; None if there is none."""
    commit = cached_commit(name, revision, "dataset")
    file = None if commit is None else _commit_folder(name, commit) / "repository.json"
    if file is None or not file.is_file():
        return None
    kept = read_json(file)
    return Repository(kept["name"], kept["commit"], kept["sizes"], kept["texts"])


def hold_to(kept: Repository, revision: str | None) -> None:
    """Use the stored description of a data set for the rest of this process, even if its
    revision has changed on the Hub.
    """
    _asked.add((kept.name, revision, kept.commit))


def find_repository(name: str, revision: str | None) -> Repository | None:
    """Return a data set's description from the Hub, or the stored one if the Hub does not answer; None without either.

    A branch is resolved once per process, as long as the cache agrees; a commit is requested only once.

    Raises:
        InputError: there is no such data set or revision, or it is gated.
    """
    kept = known_repository(name, revision)
    if kept is not None and (kept.commit == revision or (name, revision, kept.commit) in _asked):
        return kept
    try:
        found = describe_repository(name, revision)
    except Unreachable:
        return kept
    if kept is None or kept.commit != found.commit:
        found = Repository(name, found.commit, found.sizes, _fetch_texts(found))
        found.folder.mkdir(parents=True, exist_ok=True)
        put(found.folder / "repository.json", json.dumps(asdict(found)))
    keep_commit(name, revision, found.commit, "dataset")
    hold_to(found, revision)
    return found


@cache
def settle_commit(name: str, revision: str | None) -> None:
    """Find out which commit a data set has, so that results before and after the first draw are of the same one; the
    Hub is asked once per process, whether it answers or not."""
    with suppress(InputError):  # whoever draws samples is told
        find_repository(name, revision)


def _fetch_texts(found: Repository) -> dict[str, str]:
    from huggingface_hub import hf_hub_download

    with bar_of(found.name) as bar:
        fetch = partial(hf_hub_download, found.name, repo_type="dataset", revision=found.commit, tqdm_class=bar)
        return {
            file: Path(fetch(filename=file)).read_text(encoding="utf-8", errors="replace")
            for file in (CARD, SETTINGS, INFOS)
            if file in found.sizes
        }


def cache_folder_of(name: str) -> Path:
    """Return the folder in which `datasets` prepares a data set on the Hub."""
    datasets = import_datasets(name)
    owner, slash, own = name.rpartition("/")
    return (
        Path(datasets.config.HF_DATASETS_CACHE)
        / f"{owner}{'___' if slash else ''}{datasets.naming.camelcase_to_snakecase(own)}"
    )


def _commit_folder(name: str, commit: str) -> Path:
    # Beside what `datasets` prepares, on the disk that was chosen for data.
    folder = cache_folder_of(name)
    return folder.parent / "featcal" / folder.name / commit
