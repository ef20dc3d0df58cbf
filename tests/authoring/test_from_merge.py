"""What a merged model was made of, as the files beside its weights say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from featcal.authoring.from_merge import Origins, find_origins
from featcal.system.errors import InputError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A merged model's folder, two below where its parents lie; commands run elsewhere."""
    for name in ("base", "a", "b", "elsewhere", "out/merge"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "base" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "out" / "merge"


def recipe(method: str = "task_arithmetic", base: str | None = "./base", **more: Any) -> dict[str, Any]:
    models = [{"model": f"./{name}", "parameters": {"weight": weight}} for name, weight in (("a", 0.6), ("b", 0.2))]
    content = {"merge_method": method, "base_model": base, "models": models, **more}
    return {key: value for key, value in content.items() if value is not None}


def write(folder: Path, content: dict[str, Any]) -> None:
    (folder / "mergekit_config.yml").write_text(yaml.safe_dump(content))


def card(folder: Path, text: str = "", **data: Any) -> None:
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump(data)}---\n{text}\n")


def test_a_configuration_names_base_and_experts_from_where_it_was_run(folder: Path) -> None:
    write(folder, recipe(parameters={"lambda": 0.5}))
    found = find_origins(folder, None, {})
    root = folder.parents[1]
    assert (found.base, found.experts) == (str(root / "base"), {"a": str(root / "a"), "b": str(root / "b")})
    assert found.coefficients == pytest.approx({"a": 0.3, "b": 0.1})
    assert found.contents is not None
    assert found.contents.is_exact


def test_a_card_that_quotes_the_configuration_says_the_same(folder: Path) -> None:
    card(folder, f"# merge\n\n```yaml\n{yaml.safe_dump(recipe())}```", base_model=[], tags=["mergekit", "merge"])
    quoted = find_origins(folder, None, {})
    other = "```yaml\nlicense: mit\n```\n\nMerged with `merge_method: ties`.\n\n"
    card(folder, f"{other}```yaml\n{yaml.safe_dump(recipe())}```", base_model=[], tags=["mergekit", "merge"])
    assert find_origins(folder, None, {}).experts == quoted.experts
    write(folder, recipe())
    assert quoted.where == "README.md"
    assert find_origins(folder, None, {}).experts == quoted.experts


def test_of_a_card_with_several_recipes_the_models_that_it_lists_count(folder: Path) -> None:
    steps = "\n".join(f"```yaml\n{yaml.safe_dump(recipe(method))}```\n" for method in ("ties", "slerp"))
    card(folder, steps, base_model=["some/first", "some/second"], tags=["mergekit", "merge"])
    with pytest.raises(InputError, match=r"README.md names 'some/first', 'some/second', but not the model"):
        find_origins(folder, None, {})


@pytest.mark.parametrize(
    ("content", "coefficients", "is_exact"),
    [
        (recipe("linear", None), None, True),  # without a base it is asked for
        (recipe("ties", parameters={"density": 0.5, "normalize": False}), {"a": 0.6, "b": 0.2}, False),
        (recipe("dare_ties", parameters={"density": 0.5}), None, False),
        (recipe(parameters={"normalize": True}), {"a": 0.75, "b": 0.25}, True),
        (recipe(tokenizer_source="union"), {"a": 0.6, "b": 0.2}, True),
    ],
    ids=["linear", "ties", "dare", "normalized", "union"],
)
def test_coefficients_are_those_that_the_method_gives(
    folder: Path, content: dict[str, Any], coefficients: dict[str, float] | None, is_exact: bool
) -> None:
    write(folder, content)
    found = find_origins(folder, str(folder.parents[1] / "base"), {})
    if content["merge_method"] == "linear":
        coefficients = {"a": 0.75, "b": 0.25}
    assert found.coefficients == (None if coefficients is None else pytest.approx(coefficients))
    assert found.contents is not None
    assert found.contents.is_exact == is_exact


SPLIT = [{"sources": [{"model": f"./{n}", "layer_range": [i, i + 1]}]} for i, n in enumerate(("a", "b"))]


@pytest.mark.parametrize(
    ("more", "is_uneven"),
    [
        ({"parameters": {"lambda": 0.5}}, False),
        ({"parameters": {"density": [0.5, 0.5]}}, False),
        ({"parameters": {"density": [0, 1]}}, True),
        ({"parameters": {"weight": [{"value": 0.1}]}}, False),
        ({"parameters": {"weight": [{"filter": "mlp", "value": 1.0}, {"value": 0.1}]}}, True),
        ({"parameters": {"weight": {"filter": "mlp", "value": 1.0}}}, True),
        ({"models": [{"model": "./a", "parameters": {"weight": [0, 1]}}, {"model": "./b"}]}, True),
        ({"models": None, "slices": SPLIT}, True),
        ({"models": None, "slices": SPLIT[:1]}, False),
        ({"models": None, "modules": {"text": {"slices": SPLIT}}}, True),
    ],
)
def test_a_recipe_says_whether_its_layers_differ(folder: Path, more: dict[str, Any], is_uneven: bool) -> None:
    write(folder, recipe(dtype="bfloat16", **more))
    found = find_origins(folder, None, {}).contents
    assert found is not None
    assert (found.is_uneven, found.dtype) == (is_uneven, "bfloat16")


def test_what_is_given_goes_before_what_is_written(folder: Path) -> None:
    write(folder, recipe())
    root = folder.parents[1]
    assert find_origins(folder, "me/base", {}).base == "me/base"
    found = find_origins(folder, None, {"b": "me/b"})
    assert found.experts == {"a": str(root / "a"), "b": "me/b"}
    found = find_origins(folder, None, {"c": "me/c"})
    assert (found.experts, found.coefficients) == ({"c": "me/c"}, None)
    (folder / "mergekit_config.yml").write_text("merge_method: 3\nmodels: what\n")
    assert find_origins(folder, "me/base", {"c": "me/c"}) == Origins("me/base", {"c": "me/c"})


def test_a_card_lists_models(folder: Path) -> None:
    card(folder, base_model=["me/base", "me/a", "me/b"], base_model_relation="merge")
    with pytest.raises(InputError, match=r"'me/base', 'me/a', 'me/b', but not .*--base REFERENCE; it may be one"):
        find_origins(folder, None, {})
    found = find_origins(folder, "me/base", {})
    assert (found.experts, found.where) == ({"a": "me/a", "b": "me/b"}, "README.md")
    card(folder, base_model=["me/base", "me/a"], base_model_relation="merge", tags=["merge", "featcal"])
    assert find_origins(folder, None, {}) == Origins("me/base", {"a": "me/a"}, "README.md")  # its own begin with it
    # Those of local models are in no card: of three models it names two, and the first may be any.
    (folder / "featcal.json").write_text(json.dumps({"inputs": {"base": {}, "expert a": {}, "expert base": {}}}))
    with pytest.raises(InputError, match=r"'me/base', 'me/a', but not .*--base REFERENCE"):
        find_origins(folder, None, {})


REFUSED: dict[str, tuple[dict[str, Any] | None, dict[str, Any] | None]] = {
    "does not name the models that it was merged from": (None, None),
    "names no base models of a merge": (None, {"base_model": "me/base"}),  # a fine-tuned model, not a merge
    "'me/a', 'me/b', but not the model that they were fine-tuned from; give it with --base REFERENCE; it may be one": (
        None,
        {"base_model": ["me/a", "me/b"], "base_model_relation": "merge"},
    ),
    "names './gone', which is no folder .*; say where it is with --base FOLDER": (recipe(base="./gone"), None),
    "unknown key": ({**recipe(), "merge_methods": 1}, None),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_is_not_said_is_asked_for(folder: Path, said: str) -> None:
    content, data = REFUSED[said]
    if content is not None:
        write(folder, content)
    if data is not None:
        card(folder, **data)
    with pytest.raises(InputError, match=said):
        find_origins(folder, None, {})


SLERP = recipe("slerp", "./a", models=[{"model": "./a"}, {"model": "./b"}], parameters={"t": 0.5})


def test_the_base_that_no_recipe_names_is_the_one_that_all_experts_name(folder: Path) -> None:
    root = folder.parents[1]
    write(folder, SLERP)
    experts = {"a": str(root / "a"), "b": str(root / "b")}
    plain = find_origins(folder, None, {})
    assert (plain.base, plain.experts, plain.found, plain.missed) == (None, experts, False, "")
    card(root / "a", base_model="../base")
    assert find_origins(folder, None, {}).base is None  # one of two does not make it the base of both
    (root / "b" / "config.json").write_text(json.dumps({"_name_or_path": str(root / "base")}))
    found = find_origins(folder, None, {})
    assert (found.base, found.experts, found.found) == (str(root / "base"), experts, True)
    given = find_origins(folder, "me/base", {})
    assert (given.base, given.found) == ("me/base", False)
    # Of experts that are given by hand alone it is looked for too.
    (folder / "mergekit_config.yml").unlink()
    by_hand = find_origins(folder, None, experts)
    assert (by_hand.base, by_hand.found) == (str(root / "base"), True)
    assert find_origins(folder, None, {"c": str(root / "base")}).base is None


def test_a_base_that_cannot_be_had_is_named_and_not_taken(folder: Path) -> None:
    root = folder.parents[1]
    write(folder, SLERP)
    for name in ("a", "b"):
        card(root / name, base_model="me/gone")
    found = find_origins(folder, None, {})
    assert (found.base, found.found, found.missed) == (None, False, "me/gone")


def test_of_a_cards_list_the_one_that_the_others_name_is_the_base(folder: Path) -> None:
    root = folder.parents[1]
    listed = [str(root / name) for name in ("a", "base", "b")]
    card(folder, base_model=listed, tags=["merge"])
    for name in ("a", "b"):
        card(root / name, base_model=str(root / "base"))
    found = find_origins(folder, None, {})
    assert (found.base, found.experts) == (listed[1], {"a": listed[0], "b": listed[2]})
