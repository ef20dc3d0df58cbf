"""Select samples whose answer changed between two models, with their pictures or texts."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from io import BytesIO

from PIL import Image
from torch import Tensor

from featcal.evaluation.comparison import BROKEN, FIXED, flips
from featcal.evaluation.evaluate import TaskScore
from featcal.figures.report.content import Thumbnail
from featcal.samples.sources import Samples
from featcal.system.formatting import shorten

MOST = 12
"""Most samples shown of a task."""
SIDE = 96
"""Most pixels of a picture's longer side."""
LETTERS = 300
"""Most characters of a text."""


def find_turned(before: TaskScore, after: TaskScore) -> tuple[list[int], list[int]]:
    """Return positions of samples that became right, and of those that became wrong; none without answers."""
    was, now = before.right, after.right
    if was is None or now is None:
        return [], []
    became = flips(was.tolist(), now.tolist())
    fixed, broken = ([i for i, one in enumerate(became) if one == kind] for kind in (FIXED, BROKEN))
    return fixed, broken


def pick_thumbnails(data: Samples, models: Mapping[str, TaskScore]) -> Iterator[Thumbnail]:
    """Yield some of the samples whose answer changed from the first of two models to the second, half of each kind
    where there are so many.

    Args:
        data: the scored samples, in raw form.
    """
    (first, before), (second, after) = models.items()
    fixed, broken = find_turned(before, after)
    some = fixed[: max(MOST // 2, MOST - len(broken))]
    for i in [*some, *broken[: MOST - len(some)]]:
        kind = "fixed" if i in some else "broken"
        caption = f"{kind}, sample {data.indices[i]}: {_word(data, before.labels[i])}; "
        caption += f"{first}: {_word(data, before.predictions[i])}, {second}: {_word(data, after.predictions[i])}"
        picture = None if data.images is None else data_address(Image.fromarray(data.images[i]))
        text = None if data.texts is None else shorten(data.texts[i], LETTERS)
        yield Thumbnail(caption, picture, text)


def data_address(picture: Image.Image, side: int = SIDE) -> str:
    """Return a picture as a `data:` address with its content.

    Args:
        side: largest number of pixels of the longer side.
    """
    small = picture.copy()
    small.thumbnail((side, side))
    written = BytesIO()
    small.save(written, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"


def _word(data: Samples, answer: str | Tensor) -> str:
    if isinstance(answer, str):
        return shorten(answer.strip())
    return f"class {int(answer)}" if data.class_names is None else data.class_names[int(answer)]
