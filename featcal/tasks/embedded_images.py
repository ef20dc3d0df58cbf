"""The eight picture tasks of the ``clip-mini`` suite, drawn at run time.

Nothing is stored but a small atlas (``data/clip-mini/glyphs.npz``); every picture is drawn with numpy from a
frozen random stream, so a pool is the same on every run. Pools of different splits come from different
streams and never share a picture. Handwritten digits are a finite set, so their scans are divided between the
splits first, class by class, and no scan appears in two splits; within a split a scan may be drawn several
times, each time placed, inked and lit anew.

Digits: "Optical Recognition of Handwritten Digits", E. Alpaydin and C. Kaynak, UCI Machine Learning
Repository, doi:10.24432/C50P49, licence CC BY 4.0 (the 1797 scans that scikit-learn redistributes). Letters:
the built-in font of Pillow (Aileron, CC0).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcal.resources import data_path

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]
Drawing = Callable[[Floats, Floats], Floats]

SIZE = 32
_CHUNK = 512  # pictures painted at once: the working set stays in cache

CLASSES: dict[str, tuple[str, ...]] = {
    "digits": ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    "letters": tuple("abcdefghijklmnopqrstuvwxyz"),
    "shapes": (
        "circle", "square", "triangle", "star", "cross", "heart", "crescent", "ring", "hexagon", "semicircle",
    ),
    "textures": (
        "striped", "dotted", "checkered", "zigzag", "gridded", "brick", "concentric", "radial", "wavy", "marbled",
    ),
    "colors": ("red", "orange", "yellow", "green", "cyan", "blue", "purple", "pink", "brown", "black"),
    "arrows": ("east", "southeast", "south", "southwest", "west", "northwest", "north", "northeast"),
    "flags": (
        "france", "italy", "belgium", "germany", "netherlands", "austria", "ukraine", "japan", "sweden", "denmark",
    ),
    "faces": ("happy", "sad", "surprised", "angry", "neutral", "winking", "sleeping", "smirking"),
}  # fmt: skip

TEMPLATES: dict[str, tuple[str, ...]] = {
    "digits": ("a photo of the digit {}.", "a handwritten {}.", "the number {}."),
    "letters": ("a photo of the letter {}.", "a plate with the letter {}.", "the character {}."),
    "shapes": ("a photo of a {}.", "a paper {}.", "a drawing of a {}."),
    "textures": ("a photo of a {} texture.", "a {} pattern.", "a {} surface."),
    "colors": ("a photo of a {} ball.", "a {} thing.", "an object that is {}."),
    "arrows": ("a photo of an arrow pointing {}.", "a road sign pointing {}.", "an arrow to the {}."),
    "flags": ("a photo of the flag of {}.", "the flag of {}.", "a banner of {}."),
    "faces": ("a photo of a {} face.", "a {} smiley.", "somebody who looks {}."),
}

SPLITS: dict[str, int] = {"train": 5000, "calibration": 512, "validation": 500, "test": 500}

# scans of each digit kept for a split; the rest is for training
_DIGIT_SCANS: dict[str, slice] = {
    "test": slice(0, 50), "validation": slice(50, 80), "calibration": slice(80, 100), "train": slice(100, None),
}  # fmt: skip


@dataclass(frozen=True)
class _Order:
    """What to draw: ``labels`` [n], out of which ``split``, plain or in the look of the task."""

    rng: np.random.RandomState
    labels: Ints
    split: str
    plain: bool

    def uniform(self, low: float, high: float, width: int = 1) -> Floats:
        """Random numbers of shape [n, 1, 1, width]."""
        return self.rng.uniform(low, high, (len(self.labels), 1, 1, width)).astype(np.float32)


@lru_cache(maxsize=64)
def render(task: str, split: str, seed_offset: int = 0) -> tuple[NDArray[np.uint8], Ints]:
    """The pool of a split: images [n, 32, 32, 3] and class indices [n]; classes are balanced and shuffled.

    The arrays are cached and read-only. ``seed_offset`` draws another pool of the same split.
    """
    if task not in CLASSES:
        raise ValueError(f"no embedded task {task!r}; there are {', '.join(CLASSES)}")
    if split not in SPLITS:
        raise ValueError(f"no split {split!r}; there are {', '.join(SPLITS)}")
    rng = np.random.RandomState(zlib.crc32(f"{task}/{split}/{seed_offset}".encode()))
    labels = rng.permutation(np.arange(SPLITS[split]) % len(CLASSES[task])).astype(np.int64)
    images = draw(task, labels, rng, split=split)
    images.flags.writeable = False
    labels.flags.writeable = False
    return images, labels


def draw(task: str, labels: Ints, rng: np.random.RandomState, *, split: str, plain: bool = False) -> NDArray[np.uint8]:
    """Images uint8 [n, 32, 32, 3] of the classes ``labels`` [n].

    ``plain`` draws what the base model of the suite learnt from: the object alone in two random colours,
    without the surroundings, colours and clutter that are the look of the task.
    """
    chunks = []
    for start in range(0, len(labels), _CHUNK):
        order = _Order(rng, labels[start : start + _CHUNK], split, plain)
        image = _PAINTERS[task](order)
        light = 1 + _slope(order, 0.0 if plain else 0.25)
        chunks.append((np.clip(image * light + _noise(rng, image.shape, 0.025), 0, 1) * 255 + 0.5).astype(np.uint8))
    return np.concatenate(chunks)


# ---------------------------------------------------------------------------------------------- drawing kit


def _noise(rng: np.random.RandomState, shape: tuple[int, ...], deviation: float) -> Floats:
    """Bell-shaped noise: the sum of two random bytes, which is much cheaper than normal numbers."""
    one, two = rng.randint(0, 256, (2, *shape), dtype=np.uint8)
    noise: Floats = (one.astype(np.float32) + two - 255) * np.float32(deviation / 104.5)
    return noise


def _grid() -> tuple[Floats, Floats]:
    """Pixel centres x (to the right) [1, 1, 32] and y (down) [1, 32, 1] in the square [-1, 1]."""
    axis = ((np.arange(SIZE) + 0.5) / (SIZE / 2) - 1).astype(np.float32)
    return axis[None, None, :], axis[None, :, None]


def _frame(order: _Order, size: float, turn: float, shift: float) -> tuple[Floats, Floats]:
    """Coordinates u, v [n, 32, 32] of each pixel in the frame of a jittered object of half-width ``size``."""
    jitter = 0.5 if order.plain else 1.0
    angle = order.uniform(-turn, turn)[..., 0] * jitter
    scale = size * (1 + jitter * order.uniform(-0.2, 0.2)[..., 0])
    centre = order.uniform(-shift, shift, 2) * jitter
    x, y = _grid()
    x, y = x - centre[..., 0], y - centre[..., 1]
    cos, sin = np.cos(angle) / scale, np.sin(angle) / scale
    return cos * x + sin * y, cos * y - sin * x


def _slope(order: _Order, strength: float) -> Floats:
    """A brightness ramp [n, 32, 32, 1] of random direction."""
    x, y = _grid()
    tilt = order.uniform(-strength, strength, 2)
    return (tilt[..., 0] * x + tilt[..., 1] * y)[..., None]


def _fill(distance: Floats, blur: float = 0.12) -> Floats:
    """Coverage in [0, 1], 1 where the signed distance is negative, with a soft edge."""
    cover: Floats = np.clip(0.5 - distance / blur, 0, 1)
    return cover


def _over(below: Floats, colour: Floats | Sequence[float], cover: Floats) -> Floats:
    """Paint ``colour`` [..., 3] over ``below`` [n, 32, 32, 3] where ``cover`` [n, 32, 32] is 1."""
    return below + cover[..., None] * (np.asarray(colour, dtype=np.float32) - below)


def _rgb(red: float, green: float, blue: float) -> Floats:
    return np.array([red, green, blue], np.float32)


def _near(order: _Order, colour: Sequence[float], spread: float) -> Floats:
    """One random colour per picture [n, 1, 1, 3] around ``colour``."""
    return np.asarray(colour, dtype=np.float32) + order.uniform(-spread, spread, 3)


def _sheet(order: _Order, colour: Sequence[float], spread: float = 0.06, grain: float = 0.0) -> Floats:
    """A background [n, 32, 32, 3] of about one colour with a grain."""
    sheet = np.broadcast_to(_near(order, colour, spread), (len(order.labels), SIZE, SIZE, 3))
    return sheet + _noise(order.rng, (*sheet.shape[:3], 1), grain) if grain else sheet


def _two_colours(order: _Order, cover: Floats) -> Floats:
    """The plain look: ``cover`` [n, 32, 32] in one colour on another, clearly lighter or darker, one."""
    dark, light = order.uniform(0, 0.35, 3), order.uniform(0.65, 1, 3)
    swap = order.uniform(0, 1) < 0.5
    grey = order.uniform(0, 1) < 0.5
    dark, light = (np.where(grey, c.mean(axis=-1, keepdims=True), c) for c in (dark, light))
    ink, paper = np.where(swap, dark, light), np.where(swap, light, dark)
    return _over(np.broadcast_to(paper, (*cover.shape, 3)), ink, cover)


def _by_class(labels: Ints, drawings: Sequence[Drawing], u: Floats, v: Floats) -> Floats:
    """Stack ``drawings[label](u, v)`` [n, 32, 32, ...] over the pictures."""
    out: Floats | None = None
    for index, drawing in enumerate(drawings):
        rows = np.flatnonzero(labels == index)
        if len(rows):
            part = drawing(u[rows], v[rows])
            if out is None:
                out = np.zeros((len(labels), *part.shape[1:]), np.float32)
            out[rows] = part
    assert out is not None
    return out


@lru_cache(maxsize=1)
def _atlas() -> dict[str, NDArray[np.uint8]]:
    """``letters`` [26, h, w], ``digits`` [1797, 8, 8] and ``digit_labels`` [1797]."""
    with np.load(data_path("clip-mini", "glyphs.npz")) as archive:
        return {name: archive[name] for name in archive.files}


def _sample(pictures: NDArray[np.uint8], index: Ints, u: Floats, v: Floats) -> Floats:
    """Bilinear look-up [n, 32, 32] of ``pictures[index]`` (white on black) at u, v in [-1, 1]; black outside."""
    padded = np.pad(pictures, ((0, 0), (1, 1), (1, 1))).astype(np.float32) / 255
    side = pictures.shape[1]
    column = np.clip((u + 1) * (side / 2) + 0.5, 0, side + 0.999)
    row = np.clip((v + 1) * (side / 2) + 0.5, 0, side + 0.999)
    c0, r0 = column.astype(np.int64), row.astype(np.int64)
    fc, fr = column - c0, row - r0
    which = index[:, None, None]
    top = padded[which, r0, c0] * (1 - fc) + padded[which, r0, c0 + 1] * fc
    bottom = padded[which, r0 + 1, c0] * (1 - fc) + padded[which, r0 + 1, c0 + 1] * fc
    value: Floats = (top * (1 - fr) + bottom * fr).astype(np.float32)
    return value


# ---------------------------------------------------------------------------------------------- the tasks


def _digit_rows(labels: Ints, split: str) -> Ints:
    """For each label the scan to draw: those of the split in turn, so that splits never share one."""
    known = _atlas()["digit_labels"]
    rows = np.zeros_like(labels)
    for digit in range(10):
        scans = np.flatnonzero(known == digit)
        divided = np.concatenate([scans[part] for part in _DIGIT_SCANS.values()])
        assert np.array_equal(np.sort(divided), scans), "a scan is in no split or in two"
        own = scans[_DIGIT_SCANS[split]]
        wanted = np.flatnonzero(labels == digit)
        rows[wanted] = own[np.arange(len(wanted)) % len(own)]
    return rows


def _digits(order: _Order) -> Floats:
    """Handwriting in blue ink on lined paper."""
    u, v = _frame(order, 0.8, 0.15, 0.15)
    ink = np.clip(_sample(_atlas()["digits"], _digit_rows(order.labels, order.split), u, v) * 1.3, 0, 1)
    if order.plain:
        return _two_colours(order, ink)
    _, y = _grid()
    lines = np.maximum(0, np.cos(8 * np.pi * (y + order.uniform(-1, 1)[..., 0]))) ** 4
    paper = _sheet(order, (0.93, 0.91, 0.82), 0.05)
    paper = _over(paper, (0.55, 0.65, 0.85), 0.6 * np.broadcast_to(lines, ink.shape))
    return _over(paper, _near(order, (0.12, 0.15, 0.55), 0.1), ink)


def _letters(order: _Order) -> Floats:
    """White letters on a deep green or blue enamel plate."""
    u, v = _frame(order, 0.82, 0.2, 0.12)
    ink = _sample(_atlas()["letters"], order.labels, u, v)
    if order.plain:
        return _two_colours(order, ink)
    edge = np.maximum(abs(u), abs(v))
    wall = _sheet(order, (0.55, 0.3, 0.24), 0.08, 0.08)
    plate = _over(wall, _near(order, (0.05, 0.32, 0.25), 0.12), _fill(edge - 1.2))
    plate = _over(plate, (0.85, 0.85, 0.8), _fill(abs(edge - 1.12) - 0.03, 0.1))
    return _over(plate, _near(order, (0.93, 0.93, 0.88), 0.06), ink)


def _polygon(sides: int, radius: float) -> Drawing:
    """Signed distance to a regular polygon that stands on a side."""

    def distance(u: Floats, v: Floats) -> Floats:
        sector = 2 * np.pi / sides
        angle = np.mod(np.arctan2(u, v) + sector / 2, sector) - sector / 2
        return np.hypot(u, v) * np.cos(angle) - radius

    return distance


def _star(u: Floats, v: Floats) -> Floats:
    angle = abs(np.mod(np.arctan2(u, -v) + np.pi / 5, 2 * np.pi / 5) - np.pi / 5)
    return np.hypot(u, v) * (np.cos(angle) + 1.25 * np.sin(angle)) - 1


def _heart(u: Floats, v: Floats) -> Floats:
    return (np.hypot(u, -1.1 * v - 0.75 * np.sqrt(abs(u)) + 0.3) - 0.85) * 0.8


_SHAPES: tuple[Drawing, ...] = (
    lambda u, v: np.hypot(u, v) - 0.85,
    _polygon(4, 0.72),
    _polygon(3, 0.5),
    _star,
    lambda u, v: np.maximum(np.minimum(abs(u), abs(v)) - 0.3, np.maximum(abs(u), abs(v)) - 0.9),
    _heart,
    lambda u, v: np.maximum(np.hypot(u, v) - 0.9, 0.75 - np.hypot(u - 0.45, v)),
    lambda u, v: abs(np.hypot(u, v) - 0.7) - 0.2,
    _polygon(6, 0.8),
    lambda u, v: np.maximum(np.hypot(u, v - 0.35) - 0.95, v - 0.35),
)


def _shapes(order: _Order) -> Floats:
    """Paper cut-outs with a shadow on brown kraft."""
    u, v = _frame(order, 0.8, 0.25, 0.18)
    cover = _fill(_by_class(order.labels, _SHAPES, u, v))
    if order.plain:
        return _two_colours(order, cover)
    kraft = _sheet(order, (0.66, 0.5, 0.33), 0.05, 0.06)
    shadow = np.roll(cover, (2, 2), axis=(1, 2))
    kraft = _over(kraft, (0.25, 0.17, 0.1), 0.6 * shadow)
    return _over(kraft, _near(order, (0.75, 0.75, 0.75), 0.25), cover)


def _wave(phase: Floats) -> Floats:
    """A soft square wave in [0, 1] of period 1."""
    wave: Floats = np.clip(0.5 + 2 * np.sin(2 * np.pi * phase), 0, 1)
    return wave


def _bricks(u: Floats, v: Floats) -> Floats:
    along = u + 0.5 * np.floor(1.4 * v)
    bricks: Floats = _wave(1.4 * v) * (np.mod(along, 1) > 0.15)
    return bricks


_TEXTURES: tuple[Drawing, ...] = (
    lambda u, v: _wave(v),
    lambda u, v: np.clip(1.5 - 5 * np.hypot(np.mod(u, 1) - 0.5, np.mod(v, 1) - 0.5), 0, 1),
    lambda u, v: abs(_wave(u * 0.6) - _wave(v * 0.6)),
    lambda u, v: _wave(v + abs(np.mod(u, 1) - 0.5)),
    lambda u, v: np.maximum(np.mod(u, 1) < 0.25, np.mod(v, 1) < 0.25).astype(np.float32),
    _bricks,
    lambda u, v: _wave(np.hypot(u, v)),
    lambda u, v: _wave(np.arctan2(u, v) * (8 / (2 * np.pi))),
    lambda u, v: _wave(v + 0.35 * np.sin(2.5 * u)),
    lambda u, v: _wave(0.5 * np.sin(1.3 * u + 2 * np.sin(1.1 * v)) + 0.6 * np.sin(1.7 * v + 1.5 * np.sin(u))),
)


def _textures(order: _Order) -> Floats:
    """Patterns of tile in earthy colours, seen under a tilt."""
    u, v = _frame(order, 0.42, 0.3, 0.3)
    weave = _by_class(order.labels, _TEXTURES, u, v)
    if order.plain:
        return _two_colours(order, weave)
    tile = _sheet(order, (0.72, 0.62, 0.42), 0.12, 0.08)
    return _over(tile, _near(order, (0.4, 0.22, 0.2), 0.15), 0.8 * weave)


_COLOURS = np.array(
    [
        (0.85, 0.1, 0.1), (0.95, 0.5, 0.05), (0.95, 0.9, 0.1), (0.1, 0.65, 0.15), (0.1, 0.8, 0.85),
        (0.1, 0.2, 0.85), (0.5, 0.1, 0.65), (0.98, 0.55, 0.75), (0.45, 0.27, 0.1), (0.07, 0.07, 0.07),
    ],
    dtype=np.float32,
)  # fmt: skip


def _colors(order: _Order) -> Floats:
    """A shaded ball among confetti of other colours, under water."""
    u, v = _frame(order, 0.55, 0, 0.35)
    ball = _COLOURS[order.labels][:, None, None, :] + order.uniform(-0.06, 0.06, 3)
    cover = _fill(np.hypot(u, v) - 1)
    if order.plain:
        return _over(_sheet(order, (0.85, 0.85, 0.85), 0.15), ball, cover)
    table = _sheet(order, (0.5, 0.5, 0.52), 0.1)
    x, y = _grid()
    for _ in range(6):
        other = _COLOURS[order.rng.randint(0, 10, len(order.labels))][:, None, None, :]
        at = order.uniform(-1, 1, 2)
        table = _over(table, other, _fill(np.maximum(abs(x - at[..., 0]), abs(y - at[..., 1])) - 0.14))
    shade = np.clip(0.75 - 0.35 * (u + v), 0.35, 1.2)[..., None]
    return _over(table, ball * shade, cover) * _rgb(0.5, 0.75, 1) + _rgb(0, 0.05, 0.15)


def _arrow(u: Floats, v: Floats) -> Floats:
    """Signed distance to an arrow that points to the right."""
    shaft = np.maximum(abs(v) - 0.2, np.maximum(u - 0.2, -0.85 - u))
    head = np.maximum(-u, 0.75 * u + abs(v) - 0.68)
    arrow: Floats = np.minimum(shaft, head)
    return arrow


def _arrows(order: _Order) -> Floats:
    """White arrows on a round blue road sign before a sky."""
    u, v = _frame(order, 0.75, 0.2, 0.15)
    angle = (order.labels * (np.pi / 4)).astype(np.float32)[:, None, None]
    cos, sin = np.cos(angle), np.sin(angle)
    cover = _fill(_arrow(cos * u + sin * v, cos * v - sin * u))
    if order.plain:
        return _two_colours(order, cover)
    sky = _sheet(order, (0.62, 0.72, 0.62), 0.1)
    sky = _over(sky, _near(order, (0.25, 0.35, 0.2), 0.1), _fill(-v + 0.5, 0.4))
    sign = _over(sky, _near(order, (0.1, 0.3, 0.8), 0.1), _fill(np.hypot(u, v) - 1.1))
    return _over(sign, (0.95, 0.95, 0.95), cover)


_RED, _WHITE, _BLUE, _GREEN = (0.8, 0.1, 0.15), (0.95, 0.95, 0.95), (0.1, 0.2, 0.6), (0.0, 0.55, 0.3)
_BLACK, _YELLOW = (0.06, 0.06, 0.06), (0.98, 0.82, 0.1)


def _bands(*colours: tuple[float, float, float], upright: bool = False) -> Drawing:
    """A flag of equal bands, from the left if upright, else from the top."""
    palette = np.array(colours, dtype=np.float32)

    def paint(u: Floats, v: Floats) -> Floats:
        place = u / 1.5 if upright else v
        flag: Floats = palette[np.clip(((place + 1) / 2 * len(palette)).astype(int), 0, len(palette) - 1)]
        return flag

    return paint


def _charge(field: tuple[float, ...], colour: tuple[float, ...], distance: Drawing) -> Drawing:
    """A flag of one colour with a figure in another."""
    return lambda u, v: _over(np.full((*u.shape, 3), field, np.float32), colour, _fill(distance(u, v)))


def _nordic(u: Floats, v: Floats) -> Floats:
    cross: Floats = np.minimum(abs(u + 0.4), abs(v)) - 0.2
    return cross


_FLAGS: tuple[Drawing, ...] = (
    _bands(_BLUE, _WHITE, _RED, upright=True),
    _bands(_GREEN, _WHITE, _RED, upright=True),
    _bands(_BLACK, _YELLOW, _RED, upright=True),
    _bands(_BLACK, _RED, _YELLOW),
    _bands(_RED, _WHITE, _BLUE),
    _bands(_RED, _WHITE, _RED),
    _bands(_BLUE, _YELLOW),
    _charge(_WHITE, _RED, lambda u, v: np.hypot(u, v) - 0.6),
    _charge(_BLUE, _YELLOW, _nordic),
    _charge(_RED, _WHITE, _nordic),
)


def _flags(order: _Order) -> Floats:
    """Waving flags before an evening sky."""
    u, v = _frame(order, 0.55, 0.1, 0.12)
    fold = np.zeros_like(u)
    if not order.plain:
        fold = np.sin(2.2 * u + order.uniform(0, 6.3)[..., 0])
        v = v + 0.25 * fold
    cloth = _by_class(order.labels, _FLAGS, u, v) * (1 + 0.25 * fold[..., None])
    cover = _fill(np.maximum(abs(u) - 1.5, abs(v) - 1))
    if order.plain:
        return _over(_sheet(order, (0.5, 0.5, 0.5), 0.4), cloth, cover)
    _, y = _grid()
    dusk = _sheet(order, (0.55, 0.35, 0.5), 0.12) + y[..., None] * _rgb(0.25, 0.1, -0.15)
    return _over(dusk, cloth * _rgb(0.95, 0.55, 0.4), cover)


def _face(eyes: tuple[float, float], brow: float, bend: float, mouth: tuple[float, float], tilt: float) -> Drawing:
    """Distance to the lines of a face: heights of both eyes, slope of the brows, bend, size and tilt of the mouth."""

    def distance(u: Floats, v: Floats) -> Floats:
        half, gape = mouth
        lips = np.maximum(abs(v - 0.42 - tilt * u + bend * (u * u - 0.12)) - gape, abs(u) - half)
        lines: Floats = lips
        for side, height in ((-0.36, eyes[0]), (0.36, eyes[1])):
            eye = (np.hypot((u - side) / 0.17, (v + 0.2) / height) - 1) * min(height, 0.17)
            above = np.maximum(abs(v + 0.55 - brow * (abs(u) - 0.36)) - 0.06, abs(u - side) - 0.2)
            lines = np.minimum(lines, np.minimum(eye, above))
        return lines

    return distance


_FACES: tuple[Drawing, ...] = (
    _face((0.17, 0.17), 0.0, 1.1, (0.5, 0.09), 0.0),
    _face((0.17, 0.17), 0.5, -1.1, (0.45, 0.08), 0.0),
    _face((0.24, 0.24), 0.0, 0.0, (0.2, 0.25), 0.0),
    _face((0.15, 0.15), -0.8, -0.6, (0.45, 0.08), 0.0),
    _face((0.17, 0.17), 0.0, 0.0, (0.45, 0.08), 0.0),
    _face((0.17, 0.05), 0.0, 1.1, (0.5, 0.09), 0.0),
    _face((0.05, 0.05), 0.3, 0.0, (0.22, 0.12), 0.0),
    _face((0.17, 0.17), 0.0, 0.2, (0.4, 0.08), -0.5),
)


def _faces(order: _Order) -> Floats:
    """Yellow smileys on a purple cushion."""
    u, v = _frame(order, 0.85, 0.15, 0.12)
    lines = _fill(_by_class(order.labels, _FACES, u, v), 0.1)
    if order.plain:
        return _two_colours(order, np.maximum(lines, _fill(abs(np.hypot(u, v) - 1) - 0.04, 0.1)))
    cushion = _sheet(order, (0.5, 0.2, 0.55), 0.12, 0.05)
    head = _over(cushion, _near(order, (0.96, 0.8, 0.2), 0.06), _fill(np.hypot(u, v) - 1))
    return _over(head, _near(order, (0.25, 0.12, 0.05), 0.1), lines)


_PAINTERS: dict[str, Callable[[_Order], Floats]] = {
    "digits": _digits,
    "letters": _letters,
    "shapes": _shapes,
    "textures": _textures,
    "colors": _colors,
    "arrows": _arrows,
    "flags": _flags,
    "faces": _faces,
}
