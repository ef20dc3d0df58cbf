"""Text sets out of Debian packages, for `minilm.py`: `python benchmarks/real/debian.py --out FOLDER`.

Nobody made these texts for a benchmark, and no default of featcal was chosen on them. They need apt's lists of packages
and `apt-get install fortunes wordnet-base wamerican wngerman wfrench witalian wspanish wdutch`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

FORTUNES, WORDNET, WORDS = Path("/usr/share/games/fortunes"), Path("/usr/share/wordnet"), Path("/usr/share/dict")
ROWS, TEST = 4500, 0.15
"""The most rows of a set, and their share that tests."""
LANGUAGES = ("american-english", "dutch", "french", "italian", "ngerman", "spanish")
TOGETHER = 5
"""Words of one language in a text."""
SECTIONS = ("admin", "games", "graphics", "mail", "science", "sound", "web", "editors")
KINDS = ("computers", "definitions", "food", "humorists", "law", "love", "medicine", "politics", "science", "work")
SENSES = {4: "act", 5: "animal", 6: "artifact", 13: "food", 15: "location", 18: "person", 20: "plant", 26: "state"}
"""Kinds of nouns by the number of their file (lexnames(5WN))."""

Rows = Iterator[tuple[str, str]]


def languages(chance: random.Random) -> Rows:
    """Texts of words in one language; answers are the languages."""
    for name in LANGUAGES:
        words = [one for one in (WORDS / name).read_text(encoding="utf-8").split("\n") if one.isalpha()]
        for _ in range(ROWS // len(LANGUAGES)):
            yield " ".join(chance.sample(words, TOGETHER)), name


def sections() -> Rows:
    """Yield the lines in which packages describe themselves; answers are their sections."""
    available = subprocess.run(["apt-cache", "dumpavail"], capture_output=True, text=True, check=True).stdout
    for package in available.split("\n\n"):
        said = dict(re.findall(r"^(Section|Description(?:-en)?): (.*)$", package, re.MULTILINE))
        text = said.get("Description-en", said.get("Description", ""))
        if said.get("Section") in SECTIONS and text:
            yield text, said["Section"]


def senses() -> Rows:
    """Definitions of nouns; answers are the kinds of things that they name."""
    for line in (WORDNET / "data.noun").read_text(encoding="utf-8").splitlines():
        fields = line.split(" ", 2)
        if not line.startswith("  ") and int(fields[1]) in SENSES:
            yield line.split("| ", 1)[1].split('; "')[0].strip(), SENSES[int(fields[1])]


def fortunes() -> Rows:
    """Sayings; answers are the files they are in."""
    for kind in KINDS:
        for one in (FORTUNES / kind).read_text(encoding="utf-8").split("\n%\n"):
            if text := " ".join(one.split()):
                yield text, kind


def balanced(rows: Rows, chance: random.Random) -> Sequence[tuple[str, str]]:
    """At most `ROWS` of the rows, no text twice, and no answer more often than twice the even share."""
    by_answer: Mapping[str, list[str]] = defaultdict(list)
    for text, answer in dict(rows).items():
        by_answer[answer].append(text)
    share = 2 * ROWS // len(by_answer)
    every = [(one, answer) for answer, own in by_answer.items() for one in chance.sample(own, min(share, len(own)))]
    return chance.sample(every, min(ROWS, len(every)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for one .jsonl.gz per set")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    chance = random.Random(0)
    made = {"languages": languages(chance), "sections": sections(), "senses": senses(), "fortunes": fortunes()}
    for name, rows in made.items():
        kept = balanced(rows, chance)
        held = round(TEST * len(kept))
        lines = [
            json.dumps({"split": "test" if place < held else "train", "label": answer, "text": text})
            for place, (text, answer) in enumerate(kept)
        ]
        (out / f"{name}.jsonl.gz").write_bytes(gzip.compress("\n".join([*lines, ""]).encode(), mtime=0))
        print(f"{name}: {len(kept)} rows, {len({answer for _, answer in kept})} answers")


if __name__ == "__main__":
    main()
