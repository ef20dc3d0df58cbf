"""The options of every baseline: frozen values that tell one model from another."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from featcal.calibration.calibrate import config_for
from featcal.family.opening import Family
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.name_grammar import ModelName, known_option, value_of
from featcal.system.errors import InputError
from featcal.system.formatting import exactly


@dataclass(frozen=True)
class Options:
    """What tells a model of a baseline from others.

    Raises:
        InputError: a value outside its range; the message names the option.
    """

    kind: ClassVar[str]
    """The model's name without options."""

    def require(self, holds: bool, option: str, range_: str) -> None:
        """Raise InputError about an option unless its range `holds`."""
        if not holds:
            raise InputError(f"{self.kind}: {option} is {getattr(self, option)}; it {range_}")

    @property
    def name(self) -> str:
        """The model's name with every option."""
        return f"{self.kind}:{','.join(f'{option}={_format_value(value)}' for option, value in asdict(self).items())}"


@dataclass(frozen=True)
class Sampled(Options):
    """Of a baseline that sees samples."""

    samples: int = 256
    """Unlabelled calibration samples per task, > 0; a task that has fewer gives all it has."""
    seed: int = 42
    """Together with the task's name it decides which samples are drawn."""
    split: ClassVar[str] = "calibration"
    """Where the samples are from."""

    def __post_init__(self) -> None:
        self.require(self.samples >= 1, "samples", "is at least 1")

    @property
    def counting(self) -> CalibrationConfig:
        """A calibration on the same samples, in which every token but padding counts alike."""
        return CalibrationConfig(samples=self.samples, seed=self.seed, patch_weight=1.0)


@dataclass(frozen=True)
class RegMean(Sampled):
    """RegMean (Jin et al., arXiv 2212.09849): every linear map from the Grams of the experts' own features."""

    kind: ClassVar[str] = "regmean"
    reduce: float = 0.95
    """Factor of the off-diagonal entries of every Gram matrix, in [0, 1]: 1 is the plain regression, 0 a weighted
    average by the energy of every input."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(0 <= self.reduce <= 1, "reduce", "lies in [0, 1]")


@dataclass(frozen=True)
class RegMeanPlusPlus(RegMean):
    """RegMean++ (arXiv 2508.03121): the same with the merged model's own features in front of every block."""

    kind: ClassVar[str] = "regmean++"


@dataclass(frozen=True)
class Svc(Options):
    """Singular value calibration (arXiv 2602.05536) of a merged model, which needs no data."""

    kind: ClassVar[str] = "svc"
    alpha: float = 0.1
    """Least share of an expert's answer that counts, > 0: FusionBench's for averages and Task Arithmetic."""

    def __post_init__(self) -> None:
        self.require(0 < self.alpha < math.inf, "alpha", "is above 0 and finite")


@dataclass(frozen=True)
class Polish(Sampled):
    """A model after some steps of Adam that bring its final features closer to the experts'."""

    kind: ClassVar[str] = "polished"
    steps: int = 30
    """Steps of Adam, >= 0."""
    rate: float = 1e-4
    """Step size of Adam, > 0; chosen on the validation split of clip-mini."""
    batch: int = 8
    """Samples of every task in a step, > 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_training(self)


@dataclass(frozen=True)
class Scaled(Sampled):
    """Of a baseline that merges task vectors."""

    scale: float = 1.0
    """Factor of the merged task vector."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(math.isfinite(self.scale), "scale", "is finite")


@dataclass(frozen=True)
class Lot(Scaled):
    """LOT Merging (arXiv 2505.23859): the task vector that changes every layer's own features least."""

    kind: ClassVar[str] = "lot"


@dataclass(frozen=True)
class Esm(Scaled):
    """Essential Subspace Merging (arXiv 2602.20208): what every task vector does most to its own features."""

    kind: ClassVar[str] = "esm"


@dataclass(frozen=True)
class Coefficients(Sampled):
    """Coefficients of the task vectors, map by map (after arXiv 2605.29101): least squares on deployed inputs."""

    kind: ClassVar[str] = "coefficients"


@dataclass(frozen=True)
class Fisher(Sampled):
    """Fisher merging (arXiv 2111.09832): the average of the experts by what their predictions depend on."""

    kind: ClassVar[str] = "fisher"
    labels: int = 16
    """Labels of every sample whose gradients are taken, >= 2: where there are no more the expectation is exact."""
    normalize: bool = False
    """Divide every expert's information by its norm, so that an expert that is unsure does not outweigh others."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.labels >= 2, "labels", "is at least 2")


@dataclass(frozen=True)
class AdaMerging(Sampled):
    """AdaMerging (arXiv 2310.02575), layer-wise: coefficients trained on the entropy for *calibration* inputs."""

    kind: ClassVar[str] = "adamerging"
    steps: int = 1000
    """Steps of Adam, >= 0."""
    rate: float = 1e-3
    """Step size of Adam, > 0."""
    batch: int = 16
    """Samples of every task in a step, > 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_training(self)


@dataclass(frozen=True)
class AdaMergingTest(AdaMerging):
    """AdaMerging (arXiv 2310.02575) as published: coefficients trained on the entropy for *test* inputs."""

    kind: ClassVar[str] = "adamerging-test"
    split: ClassVar[str] = "test"


@dataclass(frozen=True)
class Surgery(Sampled):
    """Representation Surgery (arXiv 2402.02705): a model with a low-rank module per task behind its final features."""

    kind: ClassVar[str] = "surgery"
    rank: int = 16
    """Of every module, > 0."""
    steps: int = 1000
    """Steps of Adam for every task, >= 0."""
    rate: float = 1e-3
    """Step size of Adam, > 0."""
    batch: int = 16
    """Samples in a step, > 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.rank >= 1, "rank", "is at least 1")
        _require_training(self)


@dataclass(frozen=True)
class ProbSurgery(Surgery):
    """ProbSurgery: Representation Surgery whose modules are trained with noise that they learn the size of."""

    kind: ClassVar[str] = "probsurgery"
    rank: int = 128
    kl: float = 1e-4
    """Weight of the KL divergence to N(0, I) in the loss, >= 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(0 <= self.kl < math.inf, "kl", "is at least 0 and finite")


@dataclass(frozen=True)
class React(Sampled):
    """Surgery in closed form (after ReACT, arXiv 2511.10943): a model with an affine map per task behind its final
    features."""

    kind: ClassVar[str] = "react"
    ridge: float = 0.1
    """Strength of the pull to the identity, > 0, beside the mean variance of the features."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(0 < self.ridge < math.inf, "ridge", "is above 0 and finite")


Baseline = RegMean | Lot | Esm | Coefficients | Fisher | AdaMerging | Svc | Polish | Surgery | React
"""The options of any baseline."""
_ALL: tuple[type[Baseline], ...] = (
    RegMean,
    RegMeanPlusPlus,
    Lot,
    Esm,
    Coefficients,
    Fisher,
    AdaMerging,
    AdaMergingTest,
    Svc,
    Polish,
    Surgery,
    ProbSurgery,
    React,
)
KINDS: Mapping[str, type[Baseline]] = {one.kind: one for one in _ALL}
_REDUCE: Mapping[str, float] = {"pixels": 0.95, "seq2seq": 0.1, "causal": 0.6, "text": 0.1}
"""By modality, "causal" for every decoder: FusionBench's values for CLIP and GPT-2, RegMean's own for T5, and that for
encoders of text as well."""


def options_of(name: ModelName, family: Family) -> Baseline:
    """The options of a baseline that is named; those that are not said are the suite's, else the architecture's.

    Raises:
        InputError: an option that is unknown or outside its range.
    """
    kind = KINDS[name.kind]
    types = {field.name: type(field.default) for field in fields(kind)}
    given: dict[str, Any] = {}
    for option, text in name.options:
        known_option(option, tuple(types), name.kind)
        given[option] = value_of(text, types[option], f"model '{name.kind}': {option}")
    own, adapter = config_for(family), family.adapter
    reduce = _REDUCE["causal" if adapter.causal else adapter.modality]
    defaults = {"samples": own.samples, "seed": own.seed, "reduce": reduce}
    return kind(**{option: value for option, value in defaults.items() if option in types} | given)


def _require_training(options: Polish | AdaMerging | Surgery) -> None:
    """Raise InputError unless steps, rate and batch are in their ranges."""
    options.require(options.steps >= 0, "steps", "is at least 0")
    options.require(0 < options.rate < math.inf, "rate", "is above 0 and finite")
    options.require(options.batch >= 1, "batch", "is at least 1")


def _format_value(value: Any) -> str:
    return exactly(value) if isinstance(value, float) else str(value).lower()
