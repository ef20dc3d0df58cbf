"""A server for others: what visitors may read, write and take, and that nothing tells them where it lies."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import yaml
from app_pages import PAGES, button, charts, go, healthy, opened
from click.testing import CliRunner
from lanes import rows
from streamlit.testing.v1 import AppTest
from tiny_clip import TASKS, write_suite

from app import jobs as app_jobs
from app import state
from app.held_sessions import MOST, Held
from app.opening import suite_bytes
from featcal.authoring.common import write_new_file
from featcal.authoring.recipes import import_recipe
from featcal.cli import featcal_command
from featcal.family.opening import open_family
from featcal.formats.hub import RECORD_FILE
from featcal.formats.output import OutputFolder
from featcal.formats.weights import is_in_memory
from featcal.server import launch
from featcal.server.queue import Queue
from featcal.session.model_names import recorded_calibration
from featcal.session.session import Session, open_session
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.schema import Suite, load_suite
from featcal.suite.views import EvaluationSamples
from featcal.system import progress, sandbox
from featcal.system.errors import InputError
from featcal.system.json_files import read_json
from featcal.system.paths import local_path
from featcal.system.resources import bundle_root, cache_folder
from featcal.system.sandbox import ServerRules, require_inside, without_places

pytestmark = [pytest.mark.usefixtures("instant_maps"), pytest.mark.filterwarnings("ignore")]
REFUSED = "outside the folders that this server shares"
NO_HUB = "it fetches nothing from the Hub"
Serve = Callable[..., Path]


@pytest.fixture
def serve(tmp_path: Path, tiny_suite_file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Makes this process a shared server of one folder, which holds the tiny suite in `tiny`; returns the folder."""
    root = tmp_path / "shared"
    shutil.copytree(tiny_suite_file.parent, root / "tiny")
    shutil.copytree(tiny_suite_file.parent, tmp_path / "secret")
    monkeypatch.chdir(root)
    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path / "cache"))

    def start(**rules: Any) -> Path:
        monkeypatch.setenv(sandbox.VARIABLE, "")  # which is put back as it was
        ServerRules((str(root.resolve()),), rules.pop("max_memory", 2**40), **rules).to_environment()
        import streamlit

        streamlit.cache_resource.clear()
        return root

    yield start
    monkeypatch.undo()
    sandbox.server_rules.cache_clear()


@pytest.fixture
def root(serve: Serve) -> Path:
    return serve()


def read(app: AppTest) -> str:
    """Everything that a page sends to the browser."""

    def texts(block: Any) -> Iterator[str]:
        for one in block.children.values():
            if hasattr(one, "children"):
                yield from texts(one)
            yield str(getattr(one, "proto", ""))
            value = getattr(one, "value", None)
            yield str(value.to_csv()) if isinstance(value, pd.DataFrame) else str(value)

    return "\n".join([*texts(app.main), *texts(app.sidebar)])


def assert_refused(app: AppTest, root: Path, words: str = REFUSED) -> None:
    assert not app.exception
    assert [one for one in app.error if words in one.value.replace("\\", "")], [one.value for one in app.error]
    assert str(root.parent) not in read(app)


def change(file: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    content = yaml.safe_load(file.read_text())
    edit(content)
    file.write_text(yaml.safe_dump(content))


def test_nothing_applies_on_a_machine_of_ones_own(tmp_path: Path) -> None:
    assert sandbox.server_rules() is None
    require_inside(Path("/etc/passwd"), "file")
    assert without_places(f"{tmp_path} {Path.home()}") == f"{tmp_path} {Path.home()}"


@pytest.mark.parametrize("page", rows(PAGES, quick=["calibrate"], slow=PAGES))
def test_every_page_works_inside_and_says_no_place(root: Path, page: str) -> None:
    app = opened("tiny/suite.yaml", page, beside="calibrated", rho="1.5")
    assert healthy(app)
    assert page in ("models", "runs") or charts(app)  # which have tables
    said = read(app)
    assert "tiny" in said
    for place in (root.parent, bundle_root(), cache_folder()):
        assert str(place) not in said


@pytest.mark.parametrize(
    "named",
    [
        "../secret/suite.yaml",
        "../secret",
        "tiny/../../secret/suite.yaml",
        "{outside}/suite.yaml",
        "link/suite.yaml",
        "linked.yaml",
        "/etc/passwd",
        "/etc/nothing-is-here",
        "/proc/self/exe",
        "/dev/zero",
        "~/suite.yaml",
        "~root/suite.yaml",
        "a\x00b",
    ],
)
def test_a_suite_elsewhere_is_refused_whether_or_not_it_is_there(root: Path, named: str) -> None:
    (root / "link").symlink_to(root.parent / "secret")
    (root / "linked.yaml").symlink_to(root.parent / "secret" / "suite.yaml")
    app = opened(named.format(outside=root.parent / "secret"))
    words = "no suite" if named[0] == "~" else REFUSED
    assert_refused_saying_only(app, root, words, named)


def assert_refused_saying_only(app: AppTest, root: Path, words: str, named: str) -> None:
    """The visitor's own words come back in the field that they were typed into, and nowhere else."""
    assert not app.exception
    said = [one.value.replace("\\", "") for one in app.error]
    assert [one for one in said if words in one], said
    assert not [one for one in said if str(root.parent) in one]
    assert str(root.parent) not in read(app) or "{outside}" in named


ELSEWHERE: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "a base by ..": lambda content, outside: content.update(base="../../secret/base"),
    "a base by its whole path": lambda content, outside: content.update(base=str(outside / "base")),
    "an expert": lambda content, outside: content["tasks"][TASKS[0]].update(expert=str(outside / "experts" / TASKS[0])),
    "an adapter": lambda content, outside: content["tasks"][TASKS[0]].update(expert=f"base+{outside}"),
    "a merged model": lambda content, outside: content.update(merged=str(outside / "base")),
    "a file of open_clip": lambda content, outside: content.update(base=f"open_clip:ViT-B-32:{outside}/a.pt"),
    "a folder of open_clip": lambda content, outside: content.update(base=f"local-dir:{outside}"),
    "samples": lambda content, outside: content["tasks"][TASKS[0]].update(
        validation={"tensors": str(outside / "samples.safetensors"), "key": f"{TASKS[0]}.validation"}
    ),
    "pictures by ..": lambda content, outside: content["tasks"][TASKS[1]].update(
        validation={"imagefolder": "../../secret"}
    ),
    "lines of text": lambda content, outside: content["tasks"].update(
        {TASKS[1]: {"expert": "base", "calibration": {"jsonl": "/etc/passwd", "input": "{a}", "target": "{b}"}}}
    ),
}


@pytest.mark.parametrize("what", ELSEWHERE)
def test_a_suite_that_names_what_lies_elsewhere_is_refused(root: Path, what: str) -> None:
    change(root / "tiny" / "suite.yaml", lambda content: ELSEWHERE[what](content, root.parent / "secret"))
    app = opened("tiny/suite.yaml")
    assert_refused(app, root)
    app = opened("tiny/suite.yaml", "models")
    assert_refused(app, root)


LINKED = {
    "folder": "base",
    "weights": "base/model.safetensors",
    "configuration": "base/config.json",
    "samples": "samples.safetensors",
}


@pytest.mark.parametrize("what", rows(LINKED, quick=["weights"], slow=["samples"]))
def test_links_that_lead_elsewhere_are_refused(root: Path, what: str) -> None:
    inside = root / "tiny" / LINKED[what]
    outside = root.parent / "secret" / inside.relative_to(root / "tiny")
    shutil.rmtree(inside) if inside.is_dir() else inside.unlink()
    inside.symlink_to(outside)
    assert_refused(opened("tiny/suite.yaml"), root)
    inside.unlink()
    shutil.move(outside, root / "moved")
    inside.symlink_to(root / "moved")  # a link within the folder is like any file
    assert healthy(opened("tiny/suite.yaml"))


def test_a_picture_that_a_table_names_is_refused_elsewhere(root: Path) -> None:
    from featcal.samples.records import _decode

    with pytest.raises(InputError, match=REFUSED):
        _decode({"path": "/etc/passwd"}, "row 1", root)


@pytest.mark.parametrize("hub", ["openai/clip-vit-base-patch32", "hf-hub:someone/model", "owner/name@main"])
def test_nothing_is_taken_from_the_hub_or_its_cache(root: Path, hub: str) -> None:
    change(root / "tiny" / "suite.yaml", lambda content: content.update(base=hub))
    assert_refused(opened("tiny/suite.yaml"), root, NO_HUB)
    with pytest.raises(InputError, match=NO_HUB):
        open_family(load_suite("clip-vit-base-patch32-ta8"))


@pytest.mark.parametrize("named", ["../secret/base", "{outside}/experts/" + TASKS[0], "/etc", "calibrated@/etc"])
@pytest.mark.parametrize("field", ["merge", pytest.param("beside", marks=pytest.mark.slow)])
def test_a_model_elsewhere_is_refused(root: Path, field: str, named: str) -> None:
    outside = root.parent / "secret"
    app = opened("tiny/suite.yaml", "drift", **{field: named.format(outside=outside)})
    said = [one.value.replace("\\", "") for one in app.error]
    assert any(REFUSED in one for one in said), said
    assert not [one for one in said if str(outside) in one]
    assert not app.exception


@pytest.mark.slow
def test_a_model_inside_is_measured(root: Path) -> None:
    app = opened("tiny/suite.yaml", "drift", merge=f"tiny/experts/{TASKS[0]}")
    assert healthy(app)
    assert charts(app)


def test_a_record_elsewhere_is_not_read(root: Path) -> None:
    (root.parent / "secret" / "featcal.json").write_text('{"config": {}}')
    with pytest.raises(InputError, match=REFUSED):
        recorded_calibration(root.parent / "secret")


def typed(root: Path, text: str) -> AppTest:
    """The page for one's own suite, with a text in its field."""
    app = opened("tiny/suite.yaml", "bring")
    app.session_state["draft"] = app.session_state["draft-text"] = text
    return app.run()


def test_a_draft_is_written_inside_and_is_the_suite_then(root: Path) -> None:
    text = (root / "tiny" / "suite.yaml").read_text()
    app = typed(root, text)
    app.text_input[-1].set_value("tiny/own.yaml").run()
    assert healthy(app)
    button(app, "Write and open it").click().run()
    assert healthy(app)
    assert (root / "tiny" / "own.yaml").read_text() == text
    assert app.session_state["selection"].suite == "tiny/own.yaml"
    assert str(root.parent) not in read(app)


@pytest.mark.parametrize("where", ["../own.yaml", "/tmp/own.yaml", "link/own.yaml", "{outside}/own.yaml"])
def test_a_draft_is_not_written_elsewhere(root: Path, where: str) -> None:
    outside = root.parent / "secret"
    (root / "link").symlink_to(outside)
    app = typed(root, (root / "tiny" / "suite.yaml").read_text())
    app.text_input[-1].set_value(where.format(outside=outside)).run()
    said = [one.value.replace("\\", "") for one in app.error]
    assert any(REFUSED in one for one in said), said
    assert not [one for one in app.button if "Write" in one.label]
    assert not (outside / "own.yaml").exists()
    assert not (root.parent / "own.yaml").exists()


@pytest.mark.parametrize("what", rows(ELSEWHERE, quick=["a base by .."], slow=["an adapter", "samples"]))
def test_a_draft_that_names_what_lies_elsewhere_cannot_be_written(root: Path, what: str) -> None:
    """As it would be uploaded: its text is the field's."""
    content = yaml.safe_load((root / "tiny" / "suite.yaml").read_text())
    ELSEWHERE[what](content, root.parent / "secret")
    app = typed(root, yaml.safe_dump(content))
    app.text_input[-1].set_value("tiny/own.yaml").run()
    said = [one.value.replace("\\", "") for one in app.error]
    assert any(REFUSED in one for one in said), said
    assert not [one for one in said if str(root.parent) in one]
    assert not [one for one in app.button if "Write" in one.label]


def test_an_uploaded_recipe_is_not_told_what_lies_where(root: Path, tmp_path: Path) -> None:
    models = [{"model": str(root.parent / "secret" / "base")}, {"model": "tiny/base"}, {"model": "/etc"}]
    weighted = [{**one, "parameters": {"weight": 1.0}} for one in models]
    file = tmp_path / "recipe.yaml"
    file.write_text(
        yaml.safe_dump({"merge_method": "task_arithmetic", "models": weighted, "base_model": "../secret/base"})
    )
    found = import_recipe(file).suite
    named = [found["base"], *(task["expert"] for task in found["tasks"].values())]
    assert named == ["../secret/base", *(one["model"] for one in models)]


def test_a_text_that_is_too_long_is_not_read(serve: Serve) -> None:
    root = serve(text=200)
    assert_refused(typed(root, "name: a\n" + 200 * "#"), root, "longer than the 200 B that this server reads")


@pytest.mark.slow
def test_a_checkpoint_is_written_inside_alone(root: Path) -> None:
    app = opened("tiny/suite.yaml", "calibrate")
    for where in ("../out", "/tmp/featcal-out", str(root.parent / "secret" / "out")):
        app.text_input(key="folder").set_value(where)
        button(app, "Write the checkpoint").click().run()
        assert [one for one in app.error if REFUSED in one.value], where
        assert not Path(root, where).exists()
    app.text_input(key="folder").set_value("mine")
    button(app, "Write the checkpoint").click().run()
    assert healthy(app)
    assert read_json(root / "mine" / RECORD_FILE)["config"]["rho"] == 2.0
    assert str(root.parent) not in read(app)


@pytest.mark.parametrize("write", [OutputFolder, lambda out: write_new_file(out, "text")], ids=["folder", "file"])
def test_whatever_writes_is_held_to_it(root: Path, write: Callable[[Path], object]) -> None:
    for outside in (root.parent / "new", bundle_root() / "data" / "new"):
        with pytest.raises(InputError, match=REFUSED):
            write(outside)
        assert not outside.exists()


def test_names_are_text(root: Path) -> None:
    from app_pages import assert_shown_as_text, hostile

    change(root / "tiny" / "suite.yaml", lambda content: content.update(name=hostile("suite")))
    app = opened("tiny/suite.yaml", "models")
    assert_shown_as_text(app)
    assert_shown_as_text(opened(hostile("path")))


def test_an_estimate_counts_models_and_grows_with_them(tiny_suite_file: Path, tmp_path: Path) -> None:
    needed = suite_bytes(load_suite(tiny_suite_file))
    family = open_family(load_suite(tiny_suite_file))
    stored = sum(one.numel() * one.element_size() for one in family.merged.read(family.adapter.tower).values())
    assert needed > 4 * stored  # base, merged and two experts
    larger = write_suite(tmp_path / "larger")
    change(larger, lambda content: content["tasks"].update(third=content["tasks"][TASKS[0]]))
    assert suite_bytes(load_suite(larger)) >= needed + stored


def test_a_suite_that_needs_too_much_is_refused_before_it_is_read(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = serve(max_memory=1000)
    loaded: list[object] = []
    monkeypatch.setattr("app.state.open_resident", loaded.append)
    app = opened("tiny/suite.yaml")
    assert_refused(app, root, "this server allows 1000 B for all suites")
    assert loaded == []
    assert len(app.error) == 1


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def holding(rules: ServerRules | None) -> tuple[Held, Clock, Callable[[str, int], Any]]:
    clock = Clock()
    held = Held(rules, clock)
    return held, clock, lambda key, needs: held.get(key, lambda: SimpleNamespace(release=lambda: None), lambda: needs)  # type: ignore[arg-type, return-value]


@pytest.mark.slow
def test_the_suite_that_nobody_looked_at_for_longest_makes_room() -> None:
    held, _, get = holding(ServerRules(("/",), 100))
    a, b = get("a", 40), get("b", 40)
    assert get("a", 40) is a
    c = get("c", 30)  # 110 would be too many, and b was looked at before a
    assert get("a", 40) is a
    assert get("c", 30) is c
    assert get("b", 40) is not b
    with pytest.raises(InputError, match="needs about 101 B of memory, and this server allows 100 B for all suites"):
        get("d", 101)
    assert len(held) == 2  # whom nobody made go


@pytest.mark.slow
def test_no_more_than_a_few_are_open_even_where_memory_has_no_limit() -> None:
    held, clock, get = holding(None)
    first = get("0", 2**60)
    for number in range(1, MOST):
        get(str(number), 2**60)
    assert get("0", 0) is first
    get("one more", 0)
    assert len(held) == MOST
    assert get("0", 0) is first
    clock.now = 1e9
    held.let_go()
    assert get("0", 0) is first  # no limit of time either


def test_a_session_that_has_another_key_meanwhile_is_not_released_by_its_first() -> None:
    """Before its models are fetched, a suite on the Hub has another stamp than afterwards."""
    held, released = Held(None), list[str]()

    def get(key: str, name: str) -> Any:
        return held.get(key, lambda: sessions[name], int)

    sessions: Any = {name: SimpleNamespace(release=lambda name=name: released.append(name)) for name in "abcde"}
    get("a, not fetched", "a")
    get("a", "a")
    for name in "bcd"[: MOST - 1]:
        get(name, name)
    assert (len(held), released) == (MOST, [])
    get("e", "e")
    assert (len(held), released) == (MOST, ["a"])


@pytest.mark.slow
def test_an_idle_suite_leaves_the_memory() -> None:
    held, clock, get = holding(ServerRules(("/",), 100, idle=60))
    a, b = get("a", 10), get("b", 10)
    clock.now = 50
    assert get("a", 10) is a
    clock.now = 61
    held.let_go()
    assert len(held) == 1
    assert get("a", 10) is a
    assert get("b", 10) is not b


@pytest.mark.slow
def test_nobody_has_to_come_for_an_idle_suite_to_go(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the app itself, whose page is still open: the session gives back what it holds."""
    serve(idle=0.4)
    sessions: list[Session] = []
    read_models = state.open_resident

    def noted(suite: Suite) -> Session:
        sessions.append(read_models(suite))
        return sessions[-1]

    monkeypatch.setattr(state, "open_resident", noted)
    app = opened("tiny/suite.yaml")
    assert healthy(app)
    session = sessions[0]
    for _ in range(1000):
        if session.released:
            break
        time.sleep(0.01)
    assert session.released
    assert session.samples(EvaluationSamples(4)) is not session.samples(
        EvaluationSamples(4)
    )  # nothing is kept any more
    names = session.family.adapter.tower
    assert not is_in_memory(session.family.base, names)
    assert healthy(app.run())  # and comes back when somebody looks
    assert len({*map(id, sessions)}) == len(sessions) > 1


@pytest.mark.slow
def test_a_released_session_gives_the_same_numbers(tiny_suite_file: Path) -> None:
    session = open_session(load_suite(tiny_suite_file), resident=True)
    config = CalibrationConfig(samples=8)
    drift = [session.measure.drift(model).tasks[TASKS[0]].layers[-1].relative_drift for model in ("merged", config)]
    session.release()
    assert (
        session.measure.scores("merged").average
        == open_session(tiny_suite_file, resident=True).measure.scores("merged").average
    )
    again = [session.measure.drift(model).tasks[TASKS[0]].layers[-1].relative_drift for model in ("merged", config)]
    assert drift == again
    assert drift[0] != drift[1]


@pytest.fixture
def long(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Everything is worth a job, and no manager comes; the list says who looks."""
    who = ["ann"]
    monkeypatch.setattr(app_jobs, "is_long", lambda *_: True)
    monkeypatch.setattr(app_jobs, "ensure_manager", lambda queue: None)
    monkeypatch.setattr(app_jobs, "visitor", lambda: who[0])
    return who


def asks(rho: str) -> AppTest:
    app = opened("tiny/suite.yaml", "calibrate", rho=rho)
    return button(app, "Start").click().run()


def test_a_visitor_has_few_jobs_in_line_and_so_have_all(serve: Serve, long: list[str]) -> None:
    serve(jobs=2, all_jobs=3)
    for rho in ("1.1", "1.2"):
        assert healthy(asks(rho))
    refused = asks("1.3")
    assert "you have 2 unfinished jobs" in refused.error[0].value
    assert healthy(opened("tiny/suite.yaml", "calibrate", rho="1.1"))  # which is in line already
    long[0] = "bob"
    assert healthy(asks("1.3"))
    refused = asks("1.4")
    assert "3 jobs are waiting, which is all that this server accepts" in refused.error[0].value
    queue = Queue()
    assert [job.visitor for job in queue.jobs()] == ["ann", "ann", "bob"]
    queue.cancel(queue.jobs()[-1].id)
    assert healthy(asks("1.4"))


@pytest.mark.slow
def test_a_visitor_sees_own_jobs_alone_and_no_place_of_a_file(root: Path, long: list[str]) -> None:
    asks("1.1")
    (job,) = Queue().jobs()
    long[0] = "bob"
    asks("1.2")
    app = opened("tiny/suite.yaml", "jobs")
    assert [one.key for one in app.button if "cancel-" in str(one.key)] == [f"listed-cancel-{job.id + 1}"]
    long[0] = "eve"  # who has none, while others' are in line: the page is drawn, once
    drawn = opened("tiny/suite.yaml", "jobs")
    assert healthy(drawn)
    assert [one.value for one in drawn.info] == ["Nothing is running or in line."]
    long[0] = "bob"
    app = opened("tiny/suite.yaml", "calibrate", rho="1.1")  # ann's, which bob waits for as well
    assert not [one for one in app.button if "cancel-" in str(one.key)]
    queue = Queue()
    mine = queue.get(job.id + 1)
    assert mine is not None
    while (claimed := queue.claim()) is not None:
        queue.end(claimed.id, "failed", f"{root}/tiny/base is broken")
    mine.folder.mkdir(parents=True)
    mine.log.write_text(f"File {bundle_root()}/featcal/x.py, line 3: {root}/tiny/base")
    said = read(opened("tiny/suite.yaml", "jobs"))
    assert "tiny/base is broken" in said
    assert "line 3: tiny/base" in said
    for place in (root.parent, bundle_root(), cache_folder()):
        assert str(place) not in said


@pytest.mark.slow
def test_the_history_is_not_changed_by_whoever_looks(root: Path) -> None:
    app = go(opened("tiny/suite.yaml", "calibrate"), "runs")
    assert healthy(app)
    labels = {one.label for one in app.button}
    assert "Show it on every page" in labels
    assert not labels & {"Pin", "Unpin", "Delete"}
    assert not [one for one in app.text_input if one.label in ("Name", "Notes")]


@pytest.mark.slow
def test_a_report_says_no_place(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import streamlit as st

    offered: list[bytes] = []
    draw = st.download_button

    def noted(label: str, data: Any, *args: Any, **kwargs: Any) -> Any:
        if "report" in label.lower():
            offered.append(data)
        return draw(label, data, *args, **kwargs)

    monkeypatch.setattr(st, "download_button", noted)
    monkeypatch.setattr("streamlit.delta_generator.DeltaGenerator.download_button", lambda _, *a, **k: noted(*a, **k))
    app = opened("tiny/suite.yaml", "report", beside=f"tiny/experts/{TASKS[0]}")
    button(app, "Write a report").click().run()
    assert healthy(app)
    assert len(offered) == 1
    text = offered[0].decode()
    assert "tiny/suite.yaml" in text
    for place in (root.parent, bundle_root(), cache_folder()):
        assert str(place) not in text


def test_places_are_taken_out_of_texts_where_they_are_whole_paths(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = serve().resolve()
    said = f"no {root}/a b/c, {root}: '{root}' {root}. {cache_folder()}/x, {root}-else/y, see https://a.b{root}/z"
    assert without_places(
        said
    ) == f"no a b/c, .: '.' .. …/x, …/{root.parent.name}/{root.name}-else/y, see https://a.b{root}/z".replace(
        f"…/{root.parent.name}", without_places(str(root.parent))
    )
    ServerRules((str(root), str(root.parent / "secret")), 1).to_environment()
    assert without_places(f"{root.parent}/secret/base") == "secret/base"


def test_paths_are_told_apart_by_folders_not_letters(root: Path) -> None:
    (root.parent / "shared-too").mkdir()
    with pytest.raises(InputError, match=REFUSED):
        local_path("../shared-too", root, "model")
    assert local_path("tiny/../tiny", root, "model").is_dir()
    require_inside(cache_folder() / "jobs" / "results" / "a", "result", to_write=True)
    with pytest.raises(InputError, match=REFUSED):
        require_inside(cache_folder() / "runs", "history")


def test_the_command_starts_a_server_with_its_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[int, Any, ServerRules | None]] = []
    bases: list[str] = []

    def start(main: Path, port: int, extra: Any, rules: ServerRules | None = None, *, base: str, **_: Any) -> None:
        started.append((port, extra, rules))
        bases.append(base)

    monkeypatch.setattr(launch, "start_app", start)
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    run = CliRunner().invoke
    assert (
        run(featcal_command, ["app", "--shared", "--root", f"{tmp_path}/link", "--max-memory", "3GiB"]).exit_code == 0
    )
    assert run(featcal_command, ["app", "--port", "9", "--server.address=::1"]).exit_code == 0
    assert started == [
        (8501, [], ServerRules((str((tmp_path / "a").resolve()),), 3 * 2**30)),
        (9, ["--server.address=::1"], None),
    ]
    for wrong in (["--shared"], ["--root", str(tmp_path)], ["--max-memory", "1GiB"], ["--shared", "--root", "nowhere"]):
        assert run(featcal_command, ["app", *wrong]).exit_code == 2
    assert len(started) == 2
    given = ["/", "a/b/", "/Über", "https://a.org/b", "a//b", "../b", "a?b"]
    assert [run(featcal_command, ["app", "--base-url", one]).exit_code for one in given] == [0, 0, 2, 2, 2, 2, 2]
    assert run(featcal_command, ["app"], env={"STREAMLIT_SERVER_BASE_URL_PATH": "c"}).exit_code == 0
    assert bases == ["", "", "", "/a/b", "/c"]


def test_a_shared_server_listens_everywhere_offline_and_a_local_one_here_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from streamlit.web import cli

    asked: list[list[str]] = []
    monkeypatch.setattr(cli, "main", lambda arguments, **_: asked.append(arguments))
    monkeypatch.setattr(launch, "_warm_up", lambda app: None)
    monkeypatch.setattr(launch, "_warming", [])
    monkeypatch.setattr(launch.sys, "path", list(launch.sys.path))
    for name in (sandbox.VARIABLE, "HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")  # and as it was afterwards
    monkeypatch.delenv(sandbox.VARIABLE)
    monkeypatch.chdir(tmp_path)
    page = bundle_root() / "app" / "main.py"
    launch.start_app(page, 1, base="/a/b")
    launch._warming.clear()
    assert "--server.baseUrlPath=/a/b" in asked[0]
    assert capsys.readouterr().err.startswith("featcal app on http://127.0.0.1:1/a/b (")
    assert not [one for one in asked[0] if "address" in one]  # app/.streamlit/config.toml says 127.0.0.1
    assert sandbox.VARIABLE not in os.environ
    rules = ServerRules((str(tmp_path),), 7)
    try:
        launch.start_app(page, 1, ["--browser.serverPort=80"], rules)
        assert sandbox.server_rules() == rules
        launch._warming.clear()
        launch.start_app(page, 1, ["--server.address=::1"], rules)
    finally:
        monkeypatch.undo()
        sandbox.server_rules.cache_clear()
    assert {"--server.address=0.0.0.0", "--server.maxMessageSize=32", "--browser.serverPort=80"} <= {*asked[1]}
    said = [line.split(" (")[0] for line in capsys.readouterr().err.splitlines()]
    assert said == ["featcal app on http://0.0.0.0:1", "featcal app on http://[::1]:1"]


def test_memory_of_a_container_is_what_its_limit_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = progress.available_bytes()
    monkeypatch.setattr(progress, "CONTROL_GROUP", tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 150\n")
    assert (progress.available_bytes() is None) == (free is None)
    if free is None:
        return
    assert (progress.available_bytes() or 0) > 10_000
    (tmp_path / "memory.max").write_text("1000\n")
    assert progress.available_bytes() == 450
    (tmp_path / "memory.max").write_text("500\n")
    assert progress.available_bytes() == 0


def test_rules_survive_the_way_to_another_process(root: Path) -> None:
    said = json.loads(os.environ[sandbox.VARIABLE])
    assert said["roots"] == [str(root.resolve())]
    assert said == {
        "roots": [str(root.resolve())],
        "max_memory": 2**40,
        "jobs": 2,
        "all_jobs": 16,
        "idle": 900.0,
        "text": 2**20,
        "hub": False,
        "queue": "jobs",
    }


def test_the_browser_opens_once_the_app_answers_and_there_is_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses: list[str] = []
    monkeypatch.setattr(launch.webbrowser, "open", addresses.append)
    monkeypatch.setattr(launch, "ATTEMPTS", 1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        launch._open_browser("127.0.0.1", port, "/merges")
    launch._open_browser("127.0.0.1", port, "/merges")  # nobody answers any more
    assert addresses == [f"http://127.0.0.1:{port}/merges"]
    monkeypatch.setattr(launch.sys, "platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    assert not launch._has_screen()
    monkeypatch.setenv("DISPLAY", ":0")
    assert launch._has_screen()
