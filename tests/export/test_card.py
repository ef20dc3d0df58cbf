"""Model cards: what the Hub finds, what people read, and nothing that strangers' names could do to either."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from clip_config import clip_config
from command_line import Run
from huggingface_hub import EvalResult, ModelCard
from suite_edits import Edit
from tiny_clip import TASKS, write_suite
from tiny_text import text_suite

from featcal.calibration.calibrate import calibrate_to_folder, config_for
from featcal.evaluation.comparison import Comparison
from featcal.export import drift_picture
from featcal.export.card import NOT_MEASURED
from featcal.export.card_parts import load_card
from featcal.export.drift_picture import PICTURE_FILE, draw_drift
from featcal.export.licences import licence_conflicts, licence_fields, licence_of, licence_warnings
from featcal.export.merge import merge_to_folder
from featcal.export.write import rewrite
from featcal.family.opening import Family
from featcal.formats.contents import tensor_digests
from featcal.session.session import Session, open_session
from featcal.studies.history import History
from featcal.studies.scored_card import score_into_card
from featcal.suite.schema import suite_from_dict
from featcal.suite.views import EvaluationSamples
from featcal.system.errors import InputError
from featcal.system.formatting import escape_markdown, percent, points

STRANGE = "a|b <img src=https://evil.example/x> `c` **d**\n---\n# e: {f: [g]} &amp; ![h](i) \x1b[31m"
"""A name that would be a table cell, a picture, code, bold, the end of front matter, a heading, a mapping, a colour."""
TEST = EvaluationSamples(None, "test")
PIPELINES = {"clip": "zero-shot-image-classification", "t5": "text-generation", "llama": "text-generation"}


class Scored(NamedTuple):
    session: Session
    folder: Path
    before: ModelCard
    """The card as it was before anything was scored."""
    compared: Comparison


@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, marks=[] if kind == "clip" else [pytest.mark.slow]) for kind in PIPELINES],
)
def scored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scored:
    """A calibrated folder of each kind of model, with its scores in its card."""
    root = tmp_path_factory.mktemp(request.param)
    file = write_suite(root / "suite") if request.param == "clip" else text_suite(root / "suite", request.param)
    session, out = open_session(file), root / "out"
    calibrate_to_folder(session.family, config_for(session.family, samples=6), out)
    before = load_card(out)
    score_into_card(session, out, TEST, History(root / "runs"))
    return Scored(session, out, before, session.measure.compare("merged", str(out), TEST))


def test_the_hub_reads_what_the_model_does_and_its_scores(scored: Scored, request: pytest.FixtureRequest) -> None:
    kind = str(request.node.callspec.params["scored"])
    data = ModelCard.load(scored.folder / "README.md").data
    assert (data.pipeline_tag, data.library_name, data.tags) == (PIPELINES[kind], "transformers", ["merge", "featcal"])
    assert (scored.before.data.eval_results, data.model_name) == (None, "out")
    suite, found = scored.session.family.suite.name, {one.dataset_name: one for one in data.eval_results or []}
    assert found.keys() == scored.compared.tasks.keys()
    for task, one in scored.compared.tasks.items():
        assert found[task].metric_value == one.b
        assert (found[task].metric_type, found[task].dataset_split) == (one.metric, "test")
        assert (found[task].task_type, found[task].dataset_type) == (PIPELINES[kind], f"{suite}/{task}")


def test_people_read_scores_with_interval_experts_and_samples(scored: Scored) -> None:
    text = load_card(scored.folder).text
    experts = scored.session.measure.scores("expert", TEST)
    rows = {**scored.compared.tasks, "average": scored.compared.average}
    for task, one in rows.items():
        expert = experts.average if task == "average" else experts.tasks[task].value
        apart = f"{points(one.difference)} ({points(one.low)} to {points(one.high)})"
        cells = [task, one.metric.replace("_", " "), *map(percent, (one.a, one.b)), apart, percent(expert), str(one.n)]
        assert f"| {' | '.join(cells)} |" in text
    assert "on the test split" in text
    assert NOT_MEASURED in scored.before.text
    assert NOT_MEASURED not in text


def test_people_read_the_final_drift_and_see_it_per_layer(scored: Scored) -> None:
    from PIL import Image

    record = json.loads((scored.folder / "featcal.json").read_text())
    for task, one in record["final_drift"].items():
        assert f"| {task} | {one['merged']:.4f} | {one['calibrated']:.4f} | 6 |" in scored.before.text
    assert f"]({PICTURE_FILE})" in scored.before.text
    assert PICTURE_FILE in record["written"]
    with Image.open(scored.folder / PICTURE_FILE) as picture:
        assert picture.size == (drift_picture.WIDTH, drift_picture.HEIGHT)


def test_scoring_again_changes_its_own_part_alone(scored: Scored, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(scored.folder, tmp_path / "out")
    card = load_card(tmp_path / "out")
    foreign = EvalResult("text-generation", "d/set", "Another set", "accuracy", 0.5)
    card.data.eval_results = [foreign, *(card.data.eval_results or [])]
    card.text = f"{card.text}\nMine.\n"
    card.save(tmp_path / "out" / "README.md")
    once = score_into_card(scored.session, tmp_path / "out", TEST, History(tmp_path / "runs"))
    again = load_card(tmp_path / "out")
    assert [one.model for one in once[::2]] == ["merged", "expert"]
    assert (again.text, again.data.to_dict()) == (card.text, card.data.to_dict())


@pytest.mark.slow
def test_the_command_in_the_card_makes_the_folder_again(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_suite(tmp_path / "suite").rename(tmp_path / "suite" / "tiny.yaml")
    family = open_session(file).family
    asked = config_for(family, samples=5, lam=0.2, maps=("mlp",), blocks=("block 1",))
    calibrate_to_folder(family, asked, tmp_path / "out")
    text = load_card(tmp_path / "out").text
    line = text.split("where tiny.yaml is the suite's file:\n\n```bash\n")[1].split("\n")[0]
    assert "--samples 5" in line
    monkeypatch.chdir(file.parent)
    assert run(*shlex.split(line)[1:])[0] == 0
    first, second = (
        tensor_digests([place / "model.safetensors"]) for place in (tmp_path / "out", file.parent / "calibrated")
    )
    assert first == second


def test_a_merge_says_in_words_what_it_is(tiny: Family, tmp_path: Path) -> None:
    merge_to_folder(tiny, "ties:density=0.5", None, tmp_path / "out")
    card = load_card(tmp_path / "out")
    text = card.text
    assert card.data.license is None
    assert "Unknown: the base states none." in text
    (told,) = (line for line in text.splitlines() if line.startswith("| merged model | ties:"))
    assert "density=0.5" in told
    assert "TIES as published: whole task vectors trimmed" in told
    assert "featcal merge suite.yaml --method ties:" in text  # the file's name, whatever the suite's is
    assert "{" not in text.split("```bibtex")[0]
    assert text.count(NOT_MEASURED) == 2
    scores = score_into_card(Session(tiny), tmp_path / "out", TEST, History(tmp_path / "runs"))
    after, experts = scores
    one, expert = after.tasks[TASKS[0]], experts.tasks[TASKS[0]]
    assert f"| {TASKS[0]} | accuracy | {percent(one.value)} | {percent(expert.value)} | 12 |" in (
        load_card(tmp_path / "out").text
    )


def test_a_card_names_no_file_of_a_suite_that_has_none(tiny: Family, tmp_path: Path) -> None:
    suite = suite_from_dict(tiny.suite.model_dump(exclude_none=True), tiny.suite.root)
    merge_to_folder(suite, "ties", None, tmp_path / "out")
    text = load_card(tmp_path / "out").text
    assert "Its suite has no file, so no command line makes it again." in text
    assert ".yaml" not in text


def test_what_is_not_of_this_suite_is_not_scored(tiny: Family, tmp_path: Path) -> None:
    merge_to_folder(tiny, "ties", None, tmp_path / "out")
    record = json.loads((tmp_path / "out" / "featcal.json").read_text())
    for change, said in (
        ({"suite": "another"}, "was made from the suite 'another', not from 'tiny'"),
        ({"command": "calibrate", "model": "merged", "merged": "checkpoint"}, "from another merge than the suite's"),
    ):
        (tmp_path / "out" / "featcal.json").write_text(json.dumps(record | change))
        with pytest.raises(InputError, match=said):
            score_into_card(Session(tiny), tmp_path / "out", TEST, History(tmp_path / "runs"))


def test_scores_of_other_models_than_the_calibrated_ones_are_refused(
    tiny_suite_file: Path, tiny: Family, tmp_path: Path
) -> None:
    """Neither a card nor a measurement that needs the start takes what lies in an expert's folder now."""
    out = tmp_path / "out"
    calibrate_to_folder(tiny, clip_config(samples=4), out)
    record = json.loads((out / "featcal.json").read_text())
    name, (file, _) = f"expert {TASKS[0]}", next(iter(record["inputs"][f"expert {TASKS[0]}"].items()))
    record["inputs"][name][file] = "0" * 64
    (out / "featcal.json").write_text(json.dumps(record))
    said = rf"calibrated from other weights than are there now \('{name}'\)"
    with pytest.raises(InputError, match=said):
        score_into_card(Session(tiny), out, TEST, History(tmp_path / "runs"))
    with pytest.raises(InputError, match=said):
        Session(tiny).fit.sources(str(out))


def test_evaluate_fills_in_a_card(tiny_suite_file: Path, tiny: Family, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    calibrate_to_folder(tiny, clip_config(samples=4), out)
    done, said, err = run("evaluate", tiny_suite_file, "--card", out, "--split", "validation", "--json")
    assert done == 0, err
    documents = json.loads(said)["models"]
    assert [one["model"] for one in documents] == ["merged", str(out), "expert"]
    assert (
        documents[1]["average"] == Session(tiny).measure.scores(str(out), EvaluationSamples(None, "validation")).average
    )
    found = load_card(out).data.eval_results or []
    assert [one.metric_value for one in found] == [documents[1]["tasks"][task]["value"] for task in TASKS]
    assert run("evaluate", tiny_suite_file, "--card", out, "--model", "base")[0] == 2


def with_cards(file: Path, cards: Mapping[str, str]) -> Family:
    for folder, text in cards.items():
        (file.parent / folder / "README.md").write_text(text)
    return open_session(file).family


def test_the_licence_is_the_bases_and_others_are_named(own_suite_file: Path, tmp_path: Path) -> None:
    family = with_cards(
        own_suite_file,
        {
            "base": "---\nlicense: other\nlicense_name: gemma\nlicense_link: https://x.example\nlanguage: en\n---\n# b",
            f"experts/{TASKS[0]}": "---\nlicense: cc-by-nc-4.0\n---\n",
            f"experts/{TASKS[1]}": "---\nlicense: [unclosed\n---\n",
        },
    )
    document = calibrate_to_folder(family, clip_config(samples=4), tmp_path / "out")
    stated = {"base": "gemma", f"expert {TASKS[0]}": "cc-by-nc-4.0", f"expert {TASKS[1]}": None}
    assert document["licences"] == stated
    (conflict,) = licence_conflicts(stated)
    assert conflict in document["notes"]
    assert f"'expert {TASKS[0]}': the licence is cc-by-nc-4.0, the base's is gemma" in conflict
    assert licence_warnings(stated) == [conflict, f"no licence is stated in the files of 'expert {TASKS[1]}'"]
    data = load_card(tmp_path / "out").data
    assert (data.license, data["license_name"], data["license_link"]) == ("other", "gemma", "https://x.example")
    assert data.language == ["en"]
    text = load_card(tmp_path / "out").text
    assert "gemma, which is the base's." in text
    assert all(text.count(escape_markdown(one)) == 1 for one in licence_warnings(stated))


def test_several_licences_are_stated_together() -> None:
    both = {"license": ["mit", "apache-2.0"], "license_name": "unused"}
    assert licence_of(both) == "mit and apache-2.0"
    assert licence_fields(both) == {"license": ["mit", "apache-2.0"]}
    assert licence_fields({"license": ["mit"]}) == {"license": "mit"}
    assert (licence_of({"license": []}), licence_fields({"license": []})) == (None, {})


def test_strange_names_are_shown_and_do_nothing(edit_suite: Edit, tmp_path: Path) -> None:
    def rename(content: dict[str, Any]) -> None:
        content |= {
            "name": STRANGE,
            "tasks": {f"{STRANGE} {i}": one for i, one in enumerate(content["tasks"].values())},
        }

    session = open_session(edit_suite(rename))
    calibrate_to_folder(session.family, clip_config(samples=4), tmp_path / "out")
    score_into_card(session, tmp_path / "out", TEST, History(tmp_path / "runs"))
    card = load_card(tmp_path / "out")
    assert card.data.pipeline_tag == PIPELINES["clip"]
    assert yaml.safe_load(card.data.to_yaml()).keys() >= {"model-index", "tags"}
    assert len(card.data.eval_results or []) == 2
    assert "\x1b" not in str(card)
    parsed = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable("table").parse(card.text)
    inside = [one for token in parsed for one in token.children or []]
    assert [one.attrs["src"] for one in inside if one.type == "image"] == [PICTURE_FILE]
    assert {one.content for one in [*parsed, *inside] if one.type.startswith("html")} == {
        f"<!-- {end}{part} -->\n" for part in ("scores", "licence", "final drift") for end in ("", "end of ")
    }
    headings = [parsed[i + 1].content for i, token in enumerate(parsed) if token.type == "heading_open"]
    assert headings[1:] == ["Scores", "Drift", "How it was made", "Licence"]
    rows = [i for i, token in enumerate(parsed) if token.type == "tr_open"]
    widths = [len([t for t in parsed[a : a + 24] if t.type in ("td_open", "th_open")]) for a in rows[:3]]
    assert min(widths) >= 7
    shown = [one.content for one in inside if one.type == "text"]
    assert any("a|b" in one for one in shown)


def test_the_picture_has_a_line_per_task_and_leaves_out_what_is_not_finite() -> None:
    image = draw_drift({"block 0": {"a": 1.0, "b": 0.0}, "block 1": {"a": 1.0, "b": float("nan")}})
    width, height = image.size
    left, right, top, bottom = drift_picture._LEFT, drift_picture._RIGHT, drift_picture._TOP, drift_picture._BOTTOM
    first, second = (round(left + (width - left - right) * share) for share in (0.25, 0.75))
    assert ["#{:02x}{:02x}{:02x}".format(*image.getpixel((x, top))) for x in (first, second)] == ["#0072b2"] * 2
    at_zero = ["#{:02x}{:02x}{:02x}".format(*image.getpixel((x, height - bottom))) for x in (first, second)]
    assert at_zero[0] == "#e69f00"
    assert at_zero[1] != "#e69f00"


@pytest.mark.parametrize(
    ("most", "step"), [(1.0, 0.2), (0.0, 0.2), (0.93, 0.2), (1.01, 0.5), (12.0, 5.0), (0.03, 0.01)]
)
def test_the_grid_reaches_the_largest_value(most: float, step: float) -> None:
    assert drift_picture._step({"block 0": {"a": most}}) == pytest.approx(step)


def test_an_exported_copy_keeps_the_picture(tiny: Family, tmp_path: Path) -> None:
    calibrate_to_folder(tiny, clip_config(samples=4), tmp_path / "out")
    assert PICTURE_FILE in rewrite(tmp_path / "out", tmp_path / "again")["written"]
    first, second = ((tmp_path / name / PICTURE_FILE).read_bytes() for name in ("out", "again"))
    assert first == second
