"""Sets of pictures out of Debian packages, for `images.py`: `python benchmarks/real/debian_pictures.py --out FOLDER`.

Nobody made these pictures for a benchmark, and no default of featcal was chosen on them. The packages are unpacked into
the folder `--root` and not installed: `apt-get download openclipart-png tuxpaint-stamps-default wesnoth-1.16-data
oxygen-icon-theme gnome-icon-theme elementary-xfce-icon-theme fonts-noto-color-emoji unicode-data fonts-dejavu-core
fonts-dejavu-extra fonts-freefont-ttf fonts-liberation fonts-lato fonts-cantarell fonts-comfortaa fonts-inconsolata
fonts-unifont`, and `dpkg -x PACKAGE ROOT` for each.
"""

from __future__ import annotations

import argparse
import random
import re
import string
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import numpy as np
from pictures import SIDE
from PIL import Image, ImageDraw, ImageFont, ImageOps

ROWS, TEST = 4000, 0.2
"""The most pictures of a set, and the share of its things that test."""
LARGEST = 2**20
"""Bytes of the largest file that is read."""
CLIPART = ("animals", "computer", "food", "people", "recreation", "shapes", "signs_and_symbols", "transportation")
STAMPS = ("animals", "food", "plants", "symbols", "town", "vehicles", "seasonal", "household")
THEMES = ("oxygen/base/32x32/{}", "gnome/32x32/{}", "elementary-xfce/{}/32")
ICONS = {"actions": (), "apps": (), "devices": (), "mimetypes": ("mimes",), "places": (), "status": ()}
"""Kinds of icons, with the names that they have in some themes."""
RACES = ("drakes", "dwarves", "elves-wood", "human-loyalists", "human-outlaws", "monsters", "orcs", "saurians",
         "undead-skeletal", "undead")  # fmt: skip
GROUNDS = ("bridge", "castle", "cave", "flat", "forest", "frozen", "hills", "interior", "mountains", "sand", "village",
           "walls", "water")  # fmt: skip
SCRIPTS = ("Arabic", "Armenian", "Bopomofo", "Cherokee", "Cyrillic", "Devanagari", "Ethiopic", "Georgian", "Greek",
           "Han", "Hangul", "Hebrew", "Hiragana", "Katakana", "Latin", "Thai")  # fmt: skip
WRITERS = ("freefont/FreeSerif.ttf", "freefont/FreeMono.ttf", "dejavu/DejaVuSans.ttf", "unifont/unifont.otf")
FACES = {
    "cantarell": "Cantarell", "comfortaa": "Comfortaa", "dejavu-sans": "DejaVuSans", "dejavu-serif": "DejaVuSerif",
    "free-mono": "FreeMono", "free-serif": "FreeSerif", "inconsolata": "Inconsolata", "lato": "Lato",
    "liberation-serif": "LiberationSerif",
}  # fmt: skip
"""Families of type by their names in the prompts: how their files begin."""
PER_FACE = 400

Rows = Iterator[tuple[str, str, Image.Image]]
"""Class, thing and picture; pictures of one thing are all for training or all for the test."""


def files(folder: Path, kind: str, is_animated: bool = False) -> Rows:
    """Yield the pictures of a folder; names of animated ones begin with the thing."""
    for file in sorted(folder.rglob("*.png")):
        thing = re.split(r"-|\d", file.stem)[0] if is_animated else file.stem
        if file.exists() and file.stat().st_size < LARGEST:  # links may lead to packages that are not there
            yield kind.replace("-", " ").replace("_", " "), thing, Image.open(file)


def clipart(share: Path) -> Rows:
    for kind in CLIPART:
        yield from files(share / "openclipart/png" / kind, kind)


def stamps(share: Path) -> Rows:
    for kind in STAMPS:
        yield from files(share / "tuxpaint/stamps" / kind, f"stamped {kind}")


def icons(share: Path) -> Rows:
    """Yield icons of three themes; one that several themes draw is one thing."""
    for kind, others in ICONS.items():
        for theme in THEMES:
            for name in (kind, *others):
                yield from files(share / "icons" / theme.format(name), kind)


def units(share: Path) -> Rows:
    for kind in RACES:
        yield from files(share / "games/wesnoth/1.16/data/core/images/units" / kind, kind, is_animated=True)


def terrain(share: Path) -> Rows:
    for kind in GROUNDS:
        yield from files(share / "games/wesnoth/1.16/data/core/images/terrain" / kind, kind)


def emoji(share: Path) -> Rows:
    """Yield every picture of one character in the colour font; classes are Unicode's groups."""
    font, group = read_font(share / "fonts/truetype/noto/NotoColorEmoji.ttf", 109), ""
    for line in (share / "unicode/emoji/emoji-test.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("# group: "):
            group = line.removeprefix("# group: ").replace("&", "and")
        elif re.match(r"[0-9A-F]+( FE0F)? +; fully-qualified", line):
            picture = Image.new("RGBA", (136, 128))
            ImageDraw.Draw(picture).text((0, 0), chr(int(line.split()[0], 16)), font=font, embedded_color=True)
            yield group, line.split()[0], picture


def writing(share: Path) -> Rows:
    """Yield letters in every font that has them; classes are Unicode's scripts."""
    chance = random.Random(0)
    every: Mapping[str, list[str]] = defaultdict(list)
    pattern = r"^([0-9A-F]+)(?:\.\.([0-9A-F]+))? *; (\w+) # L"
    for first, last, script in re.findall(pattern, (share / "unicode/Scripts.txt").read_text("utf-8"), re.MULTILINE):
        every[script] += map(chr, range(int(first, 16), min(int(last or first, 16), 0xFFFF) + 1))
    for script in SCRIPTS:
        for letter in chance.sample(every[script], min(len(every[script]), ROWS // len(SCRIPTS))):
            for name in WRITERS:
                if (picture := write(letter, find_font(share, name), 40)) is not None:
                    yield f"{script} letter", letter, picture


def typefaces(share: Path) -> Rows:
    """Yield three letters in every style of a family of type."""
    chance = random.Random(1)
    for name, begin in FACES.items():
        styles = [
            one for one in sorted((share / "fonts").rglob("*.[to]tf")) if re.match(f"{begin}(-|[A-Z]|\\.)", one.name)
        ]
        for _ in range(PER_FACE):
            text, style = "".join(chance.choices(string.ascii_letters, k=3)), chance.choice(styles)
            if (picture := write(text, style, 24)) is not None:
                yield name.replace("-", " "), text, picture


@cache
def find_font(share: Path, name: str) -> Path:
    """Return the file of a font."""
    return next((share / "fonts").rglob(name))


@cache
def read_font(file: Path, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(file), size, layout_engine=ImageFont.Layout.BASIC)


@cache
def box_of_none(file: Path, size: int) -> bytes:
    """Return the picture that a font draws for a character which it does not have."""
    return bytes(read_font(file, size).getmask("\uffff"))


def write(text: str, file: Path, size: int) -> Image.Image | None:
    """Return black letters on white; None where the font has none of them."""
    mask = read_font(file, size).getmask(text)
    if not any(mask.size) or not any(bytes(mask)) or bytes(mask) == box_of_none(file, size):
        return None
    picture = Image.new("L", mask.size)
    picture.im.paste(mask, (0, 0, *mask.size))
    return ImageOps.invert(ImageOps.expand(picture, 4))


def square(picture: Image.Image) -> np.ndarray:
    """Return a picture on white, in the middle of a square, as uint8 [32, 32, 3]."""
    coloured = picture.convert("RGBA")
    coloured = Image.alpha_composite(Image.new("RGBA", coloured.size, "white"), coloured).convert("RGB")
    return np.asarray(ImageOps.pad(coloured, (SIDE, SIDE), Image.Resampling.LANCZOS, color="white"))


SETS = {one.__name__: one for one in (clipart, stamps, icons, units, terrain, emoji, writing, typefaces)}


def is_of_test(thing: str) -> bool:
    return zlib.crc32(thing.encode()) % 1000 < 1000 * TEST


def make(rows: Rows) -> dict[str, np.ndarray]:
    """Return the arrays of a set, at most `ROWS` pictures and no class more often than twice the even share."""
    chance, by_class = random.Random(0), defaultdict(list)
    for kind, thing, picture in rows:
        by_class[kind].append((is_of_test(thing), square(picture)))
    classes = sorted(by_class)
    share = 2 * ROWS // len(classes)
    every = [
        (classes.index(kind), *one)
        for kind in classes
        for one in chance.sample(by_class[kind], min(share, len(by_class[kind])))
    ]
    kept = chance.sample(every, min(ROWS, len(every)))
    arrays = {"class_names": np.array(classes)}
    for name, tests in (("train", False), ("test", True)):
        own = [(label, picture) for label, is_test, picture in kept if is_test == tests]
        arrays |= {f"{name}_x": np.stack([one for _, one in own]), f"{name}_y": np.array([label for label, _ in own])}
    return arrays


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path("/"), help="folder that the packages are unpacked in")
    parser.add_argument("--out", type=Path, required=True, help="folder for one .npz per set")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, rows in SETS.items():
        arrays = make(rows(options.root / "usr" / "share"))
        np.savez_compressed(options.out / f"{name}.npz", **arrays)
        of = {part: len(arrays[f"{part}_y"]) for part in ("train", "test")}
        most = np.bincount(arrays["test_y"]).max()
        print(f"{name}: {of}, {len(arrays['class_names'])} classes, of one at most {most} in the test", flush=True)


if __name__ == "__main__":
    main()
