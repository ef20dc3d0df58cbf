"""Classes and captions of the eight tasks."""

from __future__ import annotations

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
