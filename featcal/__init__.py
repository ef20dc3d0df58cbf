"""featcal: see where a merged neural network went wrong, repair it in closed form, ship the checkpoint.

Importing the package loads nothing heavy; the names below arrive when they are first used.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the one list of public names: type checkers follow it, `_read_homes` reads it where featcal runs
    from featcal.baselines.common.baseline import Baseline as Baseline
    from featcal.calibration.calibrate import CalibrationResult as CalibrationResult
    from featcal.calibration.calibrate import calibrate_to_folder as calibrate_to_folder
    from featcal.drift.ledger import DriftLedger as DriftLedger
    from featcal.drift.ledger import LayerDrift as LayerDrift
    from featcal.drift.ledger import TaskDrift as TaskDrift
    from featcal.drift.task_vectors import task_vector_cosines as task_vector_cosines
    from featcal.evaluation.comparison import Comparison as Comparison
    from featcal.evaluation.evaluate import Scores as Scores
    from featcal.evaluation.evaluate import TaskScore as TaskScore
    from featcal.evaluation.heads import ClassificationHead as ClassificationHead
    from featcal.export.merge_result import MergeResult as MergeResult
    from featcal.export.merge_result import merge as merge
    from featcal.family.opening import Family as Family
    from featcal.family.opening import open_family as open_family
    from featcal.mergers.common.merger import MatrixMerger as MatrixMerger
    from featcal.mergers.common.merger import Merger as Merger
    from featcal.mergers.common.merger import merger as merger
    from featcal.models.families.decoder_facts import DecoderFacts as DecoderFacts
    from featcal.models.families.decoder_facts import DecoderPart as DecoderPart
    from featcal.models.families.decoder_facts import ExpertFacts as ExpertFacts
    from featcal.models.families.encoder_facts import EncoderFacts as EncoderFacts
    from featcal.models.families.registry import register_decoder as register_decoder
    from featcal.models.families.registry import register_encoder as register_encoder
    from featcal.models.model import Model as Model
    from featcal.session.api import calibrate as calibrate
    from featcal.session.api import compare as compare
    from featcal.session.api import evaluate as evaluate
    from featcal.session.api import measure_drift as measure_drift
    from featcal.session.feature_maps import FeatureMaps as FeatureMaps
    from featcal.session.session import Session as Session
    from featcal.session.session import open_session as open_session
    from featcal.studies.history import History as History
    from featcal.studies.history import HistoryEntry as HistoryEntry
    from featcal.studies.selection.choose import select as select
    from featcal.studies.selection.outcome import Selection as Selection
    from featcal.studies.sweep import Grid as Grid
    from featcal.studies.sweep import SweepPoint as SweepPoint
    from featcal.studies.sweep import run_sweep as run_sweep
    from featcal.suite.calibration_options import CalibrationConfig as CalibrationConfig
    from featcal.suite.methods import register_method as register_method
    from featcal.suite.options import option as option
    from featcal.suite.schema import Suite as Suite
    from featcal.suite.schema import load_suite as load_suite
    from featcal.suite.views import DriftOptions as DriftOptions
    from featcal.suite.views import EvaluationSamples as EvaluationSamples
    from featcal.system.errors import FeatcalError as FeatcalError
    from featcal.system.errors import InputError as InputError
    from featcal.system.errors import NumericalError as NumericalError
    from featcal.system.errors import UncheckedError as UncheckedError

__version__ = "0.1.0"


def _read_homes() -> dict[str, str]:
    """Return the module of every public name, as the list in this file has it."""
    tree = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    listed = next(node for node in tree.body if isinstance(node, ast.If)).body
    return {one.name: str(node.module) for node in listed if isinstance(node, ast.ImportFrom) for one in node.names}


_HOMES = _read_homes()
__all__ = sorted(_HOMES)


if not TYPE_CHECKING:  # to type checkers other names are errors

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'featcal' has no attribute '{name}'")
        return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
