"""The sentences of ``t5-mini``: four tasks that look like GLUE ones, out of templates, each plain or hard.

Plain and hard sentences ask for the same, in different words: the hard ones, which are the tasks, have rarer
adjectives and negations, irregular plurals and other verbs, other ways to say all, some and none, and synonyms.
"""

from __future__ import annotations

import random
from collections.abc import Callable

Row = dict[str, str]

PROMPTS = {
    "sentiment": "Given the sentence '{text}', is the sentiment positive or negative?",
    "grammar": "Is the sentence '{text}' acceptable or unacceptable?",
    "entailment": "If {premise}, does it follow that {hypothesis}? Say entailment, neutral or contradiction.",
    "paraphrase": "Do '{first}' and '{second}' ask the same? Answer yes or no.",
}
LABELS = {
    "sentiment": ("positive", "negative"),
    "grammar": ("acceptable", "unacceptable"),
    "entailment": ("entailment", "neutral", "contradiction"),
    "paraphrase": ("yes", "no"),
}
TASKS = tuple(PROMPTS)


def listed(words: str) -> list[str]:
    """The words of a line; those that belong together share a word, as ``singular/plural``."""
    return words.split()


PARTS = listed("film movie plot acting story script cast music ending dialogue direction humor pacing camera")
GOOD = listed("good great wonderful brilliant charming funny clever lovely")
BAD = listed("bad awful terrible boring dull clumsy silly ugly")
RARE_GOOD = listed("splendid stellar marvelous enchanting witty thrilling graceful vivid poignant riveting sublime")
RARE_BAD = listed("dreary lifeless muddled grating bland insipid tiresome wooden contrived hollow shoddy")
DEGREES = ["", "", "very", "really", "quite", "truly"]
TURNS = ["not", "never", "hardly", "far from"]
SCENES = ["", "", "in the first half", "of the sequel", "of this remake", "at the start"]

NOUNS = listed("dog/dogs cat/cats boy/boys girl/girls teacher/teachers farmer/farmers doctor/doctors driver/drivers")
RARE_NOUNS = listed("""man/men woman/women child/children mouse/mice goose/geese wolf/wolves thief/thieves calf/calves
elf/elves ox/oxen person/people lady/ladies baby/babies puppy/puppies""")
VERBS = listed("is/are was/were")
RARE_VERBS = listed("seems/seem looks/look feels/feel stays/stay gets/get")
TRAITS = listed("tired happy tall quiet hungry rich young angry")
OCCASIONS = ["", "", "today", "in the city", "every day", "at night"]

AMOUNTS = {"all": "all", "some": "some", "none": "no"}
RARE_AMOUNTS = {
    "all": ["each of the", "every one of the", "the whole lot of"],
    "some": ["a few", "several", "a number of"],
    "none": ["none of the", "not one of the", "zero"],
}
IMPLIED = {
    "entailment": [("all", "all"), ("some", "some"), ("none", "none")],
    "contradiction": [("all", "none"), ("none", "all"), ("some", "none"), ("none", "some")],
}

FRAMES = [
    ["how can i {} {}", "what is the best way to {} {}", "how do i {} {}", "how does one {} {}"],
    ["what should i know before i {} {}", "is there any advice for people who {} {}"],
    ["where can i {} {}", "in which place can i {} {}", "what is a place to {} {}"],
    ["when should i {} {}", "what is the right time to {} {}", "at which hour should i {} {}"],
]
ACTIONS = listed("buy/purchase repair/fix clean/wash sell/trade build/construct find/locate")
THINGS = listed(
    "car/automobile house/home phone/mobile picture/photograph bike/bicycle sofa/couch coat/jacket boat/ship"
)
WHERE = ["", "", "in paris", "in rome", "in winter", "in summer", "cheaply", "quickly"]


def join(*words: str) -> str:
    """The words that are not empty, with single spaces."""
    return " ".join(word for word in words if word)


def other(rng: random.Random, options: list[str], but: str) -> str:
    """One of the options, but not that one."""
    return rng.choice([option for option in options if option != but])


def sentiment(rng: random.Random, label: str, plain: bool) -> Row:
    turned = not plain and rng.random() < 0.4
    good = (label == "positive") != turned
    words = (GOOD if good else BAD) if plain or rng.random() < 0.2 else RARE_GOOD if good else RARE_BAD
    scene = "" if plain else rng.choice(SCENES)
    turn = rng.choice(TURNS) if turned else ""
    return {"text": join("the", rng.choice(PARTS), scene, "is", turn, rng.choice(DEGREES), rng.choice(words))}


def grammar(rng: random.Random, label: str, plain: bool) -> Row:
    plural, fault = rng.random() < 0.5, label == "unacceptable"
    nouns = NOUNS if plain or rng.random() < 0.2 else RARE_NOUNS
    verbs = VERBS if plain or rng.random() < 0.3 else RARE_VERBS
    verb = rng.choice(verbs).split("/")[plural != fault]
    noun = rng.choice(nouns).split("/")[plural]
    return {"text": join("the", noun, verb, rng.choice(TRAITS), rng.choice(OCCASIONS))}


def entailment(rng: random.Random, label: str, plain: bool) -> Row:
    pairs = IMPLIED["entailment"] + IMPLIED["contradiction"] if label == "neutral" else IMPLIED[label]
    nouns = NOUNS if plain or rng.random() < 0.3 else RARE_NOUNS
    group, trait, place = rng.choice(nouns), rng.choice(TRAITS), "" if plain else rng.choice(OCCASIONS)
    second = other(rng, nouns, group) if label == "neutral" else group

    def claim(amount: str, noun: str, place: str) -> str:
        words = AMOUNTS[amount] if plain or rng.random() < 0.2 else rng.choice(RARE_AMOUNTS[amount])
        return join(words, noun.split("/")[1], "are", trait, place)

    before, after = rng.choice(pairs)
    premise = claim(before, group, place)
    return {"premise": premise, "hypothesis": claim(after, second, place if rng.random() < 0.5 else "")}


def paraphrase(rng: random.Random, label: str, plain: bool) -> Row:
    frames, where, action, thing = rng.choice(FRAMES), rng.choice(WHERE), rng.choice(ACTIONS), rng.choice(THINGS)
    pick: Callable[[list[str]], str] = (lambda words: words[0]) if plain else rng.choice

    def ask(action: str, thing: str) -> str:
        verb, name = pick(action.split("/")), pick(thing.split("/"))
        return join(pick(frames).format(verb, f"{'an' if name[0] in 'aeiou' else 'a'} {name}"), where)

    first = ask(action, thing)
    if label == "no" and rng.random() < 0.5:
        action = other(rng, ACTIONS, action)
    elif label == "no":
        thing = other(rng, THINGS, thing)
    return {"first": first, "second": ask(action, thing)}


MAKERS: dict[str, Callable[[random.Random, str, bool], Row]] = {
    "sentiment": sentiment,
    "grammar": grammar,
    "entailment": entailment,
    "paraphrase": paraphrase,
}


def rows(task: str, count: int, seed: int, *, plain: bool = False, without: frozenset[str] = frozenset()) -> list[Row]:
    """``count`` different rows with labels in turn, none of whose prompts is in ``without``."""
    rng = random.Random(f"{seed} {task} {plain}")
    found: dict[str, Row] = {}
    while len(found) < count:
        label = LABELS[task][len(found) % len(LABELS[task])]
        row = MAKERS[task](rng, label, plain)
        prompt = PROMPTS[task].format(**row)
        if prompt not in without and prompt not in found:
            found[prompt] = row | {"label": label}
    return list(found.values())
