"""How functions and modules are named: by a verb or by the thing that they give, by no participle alone.

Values are named by what they hold, and a public name stands for one thing in the whole tree.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from sources import trees


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


PARTICIPLES = words(
    "beaten begun bent bitten blown born borne bought broken brought built caught chosen come dealt done drawn driven "
    "eaten fallen fed felt flown forgotten fought found frozen given gone grown heard held hidden kept known laid lain "
    "led left lent lit lost made meant met overtaken paid proven ridden risen said seen sent shaken shown shrunk slid "
    "sold sought spent spoken spun stolen struck stuck sunk swept sworn taken taught thought thrown told torn undone "
    "understood woken won worn woven written"
)
"""Irregular ones, but for those that are a verb or a noun as well: bound, cut, put, read, run, set, split, spread."""
NO_PARTICIPLES = words("bed breed embed exceed feed need proceed seed shed speed succeed")
PREPOSITIONS = words(
    "above after against along among around as at before after below beneath beside between beyond by during for from "
    "in inside into near of off on onto out outside over past per since through to toward under until upon via with "
    "within without"
)
ADVERBS = words(
    "again alike almost alone already also anew apart away ever here how just later never now often once only soon "
    "still then there thus together too twice when where why yet"
)
FIRST = words("from to with without")
"""Prepositions that a name may begin with, as in `to_json`, `from_query`, `with_suffix`."""
EXCEPTIONS = {
    "featcal.suite.schema.Suite.of": "of objects, as `from_…` would be of a file: public, and short where it stands",
    "featcal.baselines.polished": "the method's name, which its file bears",
    "featcal.calibration.distributed": "torch's word",
    "featcal.system.distributed": "torch's word",
}
"""At most ten, each with its reason."""
EMPTY = words("said told")
"""Names that no value may have, since everything is said or told: summary, options, entry and note are nouns."""


def is_participle(word: str) -> bool:
    return word.removeprefix("un") in PARTICIPLES or (
        len(word) > 3 and word.endswith("ed") and word not in NO_PARTICIPLES
    )


def fault(name: str) -> str:
    """Return what is wrong with the name of a function, in words; nothing if it is sound."""
    first, *others = name.strip("_").split("_")
    if not others:
        kinds = {
            "a participle alone": is_participle(first),
            "a preposition alone": first in PREPOSITIONS,
            "an adverb alone": first in ADVERBS,
        }
        return next((kind for kind, so in kinds.items() if so), "")
    if first in PREPOSITIONS - FIRST:
        return "a preposition first"
    return "a participle with its preposition" if is_participle(first) and others[-1] in PREPOSITIONS else ""


def functions(tree: ast.AST, place: str) -> Iterator[tuple[str, str]]:
    """Every function, method, property and inner function of a module: where it is, and its name."""
    for node in ast.iter_child_nodes(tree):
        named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        inside = f"{place}.{node.name}" if named else place
        if named and not isinstance(node, ast.ClassDef) and not node.name.startswith("__"):
            yield inside, node.name
        yield from functions(node, inside)


def values(tree: ast.AST) -> Iterator[str]:
    """Every name that a module gives to a value: a variable, a parameter, an attribute, a class or an import."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name
            case ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)) | ast.ClassDef(name=name):
                yield name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
                yield name


def public_names(tree: ast.Module) -> Iterator[str]:
    """Every public function and class that stands in a module itself."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node.name


def shared_names(modules: Mapping[str, ast.Module]) -> dict[str, list[str]]:
    """Public names that two or more modules define, with these."""
    homes: dict[str, list[str]] = defaultdict(list)
    for module, tree in modules.items():
        for name in public_names(tree):
            homes[name].append(module)
    return {name: own for name, own in homes.items() if len(own) > 1}


def is_empty(name: str) -> bool:
    """Say whether the name of a value tells nothing of what it holds, as `said`, `_SAID` and `told_by`."""
    first, *others = name.strip("_").lower().split("_")
    return first in EMPTY and PREPOSITIONS.issuperset(others)


def test_functions_and_modules_are_verbs_or_things() -> None:
    faults = {module: why for module in trees() if (why := fault(module.rsplit(".", 1)[-1])).startswith("a participle")}
    for module, tree in trees().items():
        faults |= {place: why for place, name in functions(tree, module) if (why := fault(name))}
    assert {place: why for place, why in faults.items() if place not in EXCEPTIONS} == {}
    assert EXCEPTIONS.keys() <= faults.keys(), "an exception is needed no more"
    assert len(EXCEPTIONS) <= 10


def test_values_are_called_by_what_they_hold() -> None:
    faults = {module: names for module, tree in trees().items() if (names := [*filter(is_empty, values(tree))])}
    assert faults == {}


def test_a_public_name_is_one_thing() -> None:
    assert shared_names(trees()) == {}


def test_a_name_of_two_things_is_found() -> None:
    code = {
        "deck": "def deal(): ...\nclass Card:\n    def draw(self): ...\ndef _cut(): ...",
        "hand": "def _cut(): ...\ndef draw(): ...\ndef Card(): ...",
        "game": "from deck import deal",
    }
    assert shared_names({module: ast.parse(text) for module, text in code.items()}) == {"Card": ["deck", "hand"]}


def test_empty_names_are_found() -> None:
    code = """
from deck import card as Told
_SAID = 1
class Deck:
    said: str
    def deal(self, told, *said, **told_by):
        self._told = lambda _said: [said for said in told]
        match told:
            case {"a": said, **told}: pass
"""
    found = Counter(filter(is_empty, values(ast.parse(code))))
    assert found == {"Told": 1, "_SAID": 1, "said": 4, "told": 2, "told_by": 1, "_told": 1, "_said": 1}


def test_names_with_a_noun_pass() -> None:
    assert not [*filter(is_empty, words("unsaid sayings told_options note_said summary said_words"))]


def test_bad_names_are_found() -> None:
    for name in words("settled _told drawn of _together later by_layer as_stored asked_for drawn_of"):
        (found,) = functions(ast.parse(f"class Deck:\n    if True:\n        def {name}(self): ..."), "deck")
        assert found == (f"deck.Deck.{name}", name)
        assert fault(name), name


def test_good_names_pass() -> None:
    good = "read put run split bound embed seed resolve cosine fixed_point to_json from_query is_starved hash_of"
    assert {name: fault(name) for name in words(good) if fault(name)} == {}
