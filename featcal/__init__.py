"""featcal: see where a merged neural network went wrong, repair it in closed form, ship the checkpoint.

Importing the package loads nothing heavy; the names below arrive when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from featcal.baselines.shared.baseline import Baseline
    from featcal.calibration.calibrate import CalibrationResult, calibrate, calibrate_to_folder
    from featcal.calibration.config import CalibrationConfig
    from featcal.drift.ledger import DriftLedger, LayerDrift, TaskDrift
    from featcal.drift.task_vectors import task_vector_cosines
    from featcal.evaluation.evaluate import Scores, TaskScore
    from featcal.evaluation.heads import ClassificationHead
    from featcal.evaluation.paired import Comparison
    from featcal.family.opening import Family, open_family
    from featcal.mergers.shared.merger import MatrixMerger, Merger
    from featcal.models.families.decoder_facts import DecoderFacts, DecoderPart, ExpertFacts
    from featcal.models.families.encoder_facts import EncoderFacts
    from featcal.models.families.registry import register_decoder, register_encoder
    from featcal.models.model import Model
    from featcal.session.api import compare, evaluate, measure_drift
    from featcal.session.feature_maps import Clouds
    from featcal.session.session import Session, open_session
    from featcal.studies.history import History, Run
    from featcal.studies.selection.choose import select
    from featcal.studies.selection.outcome import Selection
    from featcal.studies.sweep import Grid, SweepPoint, run_sweep
    from featcal.suite.methods import register_method
    from featcal.suite.options import option
    from featcal.suite.schema import Suite, load_suite
    from featcal.suite.views import DriftOptions, View
    from featcal.system.errors import FeatcalError, InputError, NumericalError

__version__ = "0.1.0"

_HOME = {
    "Baseline": "baselines.shared.baseline",
    "CalibrationConfig": "calibration.config",
    "CalibrationResult": "calibration.calibrate",
    "ClassificationHead": "evaluation.heads",
    "Clouds": "session.feature_maps",
    "Comparison": "evaluation.paired",
    "DecoderFacts": "models.families.decoder_facts",
    "DecoderPart": "models.families.decoder_facts",
    "DriftLedger": "drift.ledger",
    "DriftOptions": "suite.views",
    "EncoderFacts": "models.families.encoder_facts",
    "ExpertFacts": "models.families.decoder_facts",
    "Family": "family.opening",
    "FeatcalError": "system.errors",
    "Grid": "studies.sweep",
    "History": "studies.history",
    "InputError": "system.errors",
    "LayerDrift": "drift.ledger",
    "MatrixMerger": "mergers.shared.merger",
    "Merger": "mergers.shared.merger",
    "Model": "models.model",
    "NumericalError": "system.errors",
    "Run": "studies.history",
    "Scores": "evaluation.evaluate",
    "Selection": "studies.selection.outcome",
    "Session": "session.session",
    "Suite": "suite.schema",
    "SweepPoint": "studies.sweep",
    "TaskDrift": "drift.ledger",
    "TaskScore": "evaluation.evaluate",
    "View": "suite.views",
    "calibrate": "calibration.calibrate",
    "calibrate_to_folder": "calibration.calibrate",
    "compare": "session.api",
    "evaluate": "session.api",
    "load_suite": "suite.schema",
    "measure_drift": "session.api",
    "open_family": "family.opening",
    "open_session": "session.session",
    "option": "suite.options",
    "register_decoder": "models.families.registry",
    "register_encoder": "models.families.registry",
    "register_method": "suite.methods",
    "run_sweep": "studies.sweep",
    "select": "studies.selection.choose",
    "task_vector_cosines": "drift.task_vectors",
}

__all__ = [
    "Baseline",
    "CalibrationConfig",
    "CalibrationResult",
    "ClassificationHead",
    "Clouds",
    "Comparison",
    "DecoderFacts",
    "DecoderPart",
    "DriftLedger",
    "DriftOptions",
    "EncoderFacts",
    "ExpertFacts",
    "Family",
    "FeatcalError",
    "Grid",
    "History",
    "InputError",
    "LayerDrift",
    "MatrixMerger",
    "Merger",
    "Model",
    "NumericalError",
    "Run",
    "Scores",
    "Selection",
    "Session",
    "Suite",
    "SweepPoint",
    "TaskDrift",
    "TaskScore",
    "View",
    "calibrate",
    "calibrate_to_folder",
    "compare",
    "evaluate",
    "load_suite",
    "measure_drift",
    "open_family",
    "open_session",
    "option",
    "register_decoder",
    "register_encoder",
    "register_method",
    "run_sweep",
    "select",
    "task_vector_cosines",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'featcal' has no attribute '{name}'")
    return getattr(import_module(f"featcal.{_HOME[name]}"), name)
