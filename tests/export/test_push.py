"""What is pushed to the Hub is what was shown, and nothing is pushed that is not whole or has no licence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from clip_config import clip_config
from command_line import Run
from huggingface_hub import CommitOperationAdd, ModelCard
from huggingface_hub.errors import HfHubHTTPError

from featcal.calibration.calibrate import calibrate_to_folder
from featcal.export.card_parts import load_card
from featcal.export.push import pack, push_parcel
from featcal.family.opening import Family
from featcal.system.errors import InputError


class Hub:
    """The Hub, as far as a push sees it: repositories and the files in them."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.refusal: Exception | None = None

    def create_repo(self, repo_id: str, *, private: bool | None, exist_ok: bool) -> str:
        if self.refusal is not None:
            raise self.refusal
        assert exist_ok
        self.private.setdefault(repo_id, bool(private))
        self.files.setdefault(repo_id, {})
        return f"https://hub.example/{repo_id}"

    def model_info(self, repo_id: str) -> SimpleNamespace:
        return SimpleNamespace(private=self.private[repo_id])

    def create_commit(self, repo_id: str, operations: Iterable[CommitOperationAdd], *, commit_message: str) -> None:
        for one in operations:
            with one.as_file() as file:
                self.files[repo_id][one.path_in_repo] = file.read()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub()
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: made)
    return made


@pytest.fixture(scope="module")
def written(tiny: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("push") / "out"
    calibrate_to_folder(tiny, clip_config(samples=4), out)
    return out


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A written folder of one's own, with a licence."""
    own = tmp_path / "mine"
    shutil.copytree(written, own)
    card = load_card(own)
    card.data.license = "mit"
    card.save(own / "README.md")
    return own


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {one.relative_to(folder).as_posix(): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


def test_a_dry_run_lists_exactly_the_files_and_sends_nothing(folder: Path, hub: Hub, run: Run) -> None:
    status, out, err = run("push", folder, "me/mine", "--json")
    document = json.loads(out)
    assert (status, document["pushed"], hub.files) == (0, None, {})
    own = bytes_of(folder)
    assert {one["name"]: one["bytes"] for one in document["files"]} == {name: len(data) for name, data in own.items()}
    assert document["card"] == own["README.md"].decode()
    assert document["warnings"] == ["no licence is stated in the files of 'base', 'expert pets', 'expert signs'"]
    assert f"warning: {document['warnings'][0]}" in err
    status, out, _ = run("push", folder, "me/mine")
    assert [line.split()[0] for line in out.splitlines()[1 : len(own) + 1]] == sorted(own)
    assert "\nnothing was sent; add --yes" in out
    assert hub.files == {}


def test_what_was_pushed_are_the_same_bytes(folder: Path, hub: Hub, run: Run) -> None:
    (folder / "heads").mkdir()
    (folder / "heads" / "a.safetensors").write_bytes(b"head")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("not sent")
    before = bytes_of(folder)
    status, out, _ = run("push", folder, "me/mine", "--yes", "--private")
    assert status == 0
    assert "sent to https://hub.example/me/mine" in out
    assert hub.files == {"me/mine": {name: data for name, data in before.items() if name != ".git/config"}}
    assert hub.private == {"me/mine": True}
    assert bytes_of(folder) == before


def test_a_licence_that_is_given_takes_the_name_and_the_link_of_the_one_before(folder: Path) -> None:
    card = load_card(folder)
    card.data.license, card.data.license_name, card.data.license_link = "other", "mine", "LICENSE"
    card.save(folder / "README.md")
    said = ModelCard(pack(folder, "me/mine", "mit").card).data.to_dict()
    assert {name: value for name, value in said.items() if name.startswith("license")} == {"license": "mit"}
    with pytest.raises(InputError, match="--license is empty"):
        pack(folder, "me/mine", " ")


def test_a_licence_that_is_given_stands_in_the_card_once_it_is_sent(
    written: Path, tmp_path: Path, hub: Hub, run: Run
) -> None:
    own = tmp_path / "own"
    shutil.copytree(written, own)
    before = bytes_of(own)
    status, _, err = run("push", own, "me/own")
    assert (status, "states no licence; say it with --license" in err) == (1, True)
    parcel = pack(own, "me/own", "apache-2.0")
    answer: Any = SimpleNamespace(status_code=403, headers={}, request=None)
    hub.refusal = HfHubHTTPError("no", response=answer)
    with pytest.raises(InputError, match="does not let you write to 'me/own'; log in with `hf auth login`"):
        push_parcel(parcel)
    assert bytes_of(own) == before
    hub.refusal = None
    push_parcel(parcel)
    card = load_card(own)
    assert card.data.license == "apache-2.0"
    assert "apache-2.0, as the publisher of this folder states." in card.text
    assert "Unknown: the base states none." not in card.text
    assert hub.files["me/own"] == bytes_of(own)
    assert len(parcel.card.encode()) == parcel.files["README.md"]


def test_what_is_public_is_not_pushed_to_as_private(folder: Path, hub: Hub) -> None:
    hub.create_repo("me/mine", private=None, exist_ok=True)
    with pytest.raises(InputError, match="'me/mine' already exists and is public"):
        push_parcel(pack(folder, "me/mine"), private=True)
    assert hub.files == {"me/mine": {}}


def test_nothing_half_written_is_pushed(folder: Path, tmp_path: Path) -> None:
    partial = tmp_path / "made.partial"
    shutil.copytree(folder, partial / "model")
    for place in (partial, partial / "model"):
        with pytest.raises(InputError, match=r"made\.partial is incomplete"):
            pack(place, "me/mine")
    with pytest.raises(InputError, match=r"no folder .*made; made\.partial beside it is incomplete"):
        pack(tmp_path / "made", "me/mine")
    with pytest.raises(InputError, match="name one that featcal has written"):
        pack(tmp_path / "nothing", "me/mine")


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ("model.safetensors", ["no model.safetensors in", "'model.safetensors' is missing, which featcal.json names"]),
        ("config.json", ["'config.json' is missing, which featcal.json names"]),
        ("README.md", ["'README.md' is missing, which featcal.json names", "has no README.md"]),
    ],
)
def test_everything_in_the_way_is_listed_at_once(folder: Path, lost: str, said: list[str]) -> None:
    (folder / lost).unlink()
    with pytest.raises(InputError) as refused:
        pack(folder, "not-a-repository")
    problems = refused.value.problems
    assert problems[0] == "'not-a-repository' is no repository on the Hub; write it as OWNER/NAME"
    assert len(problems) == 1 + len(said)
    assert all(words in problem for words, problem in zip(said, problems[1:], strict=True))


@pytest.mark.parametrize("card", ["---\na: [\n---\n", "---\n- a\n---\n", "---\nmodel-index: [1]\n---\n"])
def test_a_card_that_cannot_be_read_is_said(folder: Path, card: str) -> None:
    (folder / "README.md").write_text(card)
    with pytest.raises(InputError, match="its front matter cannot be read"):
        pack(folder, "me/mine")


def test_an_error_of_the_hub_is_told_as_it_is(folder: Path, hub: Hub) -> None:
    hub.refusal = ConnectionError("no route")
    with pytest.raises(InputError, match=r"the Hub does not answer, or refuses \(ConnectionError: no route\)"):
        push_parcel(pack(folder, "me/mine"))


def test_the_token_is_the_clients_affair() -> None:
    from featcal.export import push as module

    assert "token=" not in Path(str(module.__file__)).read_text()
