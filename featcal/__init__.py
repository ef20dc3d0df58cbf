"""featcal: see where a merged neural network went wrong, repair it in closed form, ship the checkpoint.

Importing the package loads nothing heavy; the names below arrive when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from featcal.calibration.calibrate import CalibrationResult, calibrate, calibrate_to_folder
    from featcal.calibration.config import CalibrationConfig
    from featcal.clouds import Clouds
    from featcal.drift.ledger import DriftLedger, LayerDrift, TaskDrift
    from featcal.drift.task_vectors import task_vector_cosines
    from featcal.errors import FeatcalError, InputError, NumericalError
    from featcal.evaluation.evaluate import Scores, TaskScore
    from featcal.evaluation.heads import ClassificationHead
    from featcal.evaluation.paired import Comparison
    from featcal.family import Family, open_family
    from featcal.measure import compare, evaluate, measure_drift
    from featcal.models.architectures import register_decoder, register_encoder
    from featcal.models.decoder_facts import DecoderFacts, DecoderPart, ExpertFacts
    from featcal.models.encoder_facts import EncoderFacts
    from featcal.models.model import Model
    from featcal.runs import History, Run
    from featcal.selection.choose import select
    from featcal.selection.outcome import Selection
    from featcal.session import Session, open_session
    from featcal.suite import Suite, load_suite
    from featcal.sweep import Grid, SweepPoint, run_sweep
    from featcal.views import DriftOptions, View

__version__ = "0.1.0"

_HOME = {
    "CalibrationConfig": "calibration.config",
    "CalibrationResult": "calibration.calibrate",
    "ClassificationHead": "evaluation.heads",
    "Clouds": "clouds",
    "Comparison": "evaluation.paired",
    "DecoderFacts": "models.decoder_facts",
    "DecoderPart": "models.decoder_facts",
    "DriftLedger": "drift.ledger",
    "DriftOptions": "views",
    "EncoderFacts": "models.encoder_facts",
    "ExpertFacts": "models.decoder_facts",
    "Family": "family",
    "FeatcalError": "errors",
    "Grid": "sweep",
    "History": "runs",
    "InputError": "errors",
    "LayerDrift": "drift.ledger",
    "Model": "models.model",
    "NumericalError": "errors",
    "Run": "runs",
    "Scores": "evaluation.evaluate",
    "Selection": "selection.outcome",
    "Session": "session",
    "Suite": "suite",
    "SweepPoint": "sweep",
    "TaskDrift": "drift.ledger",
    "TaskScore": "evaluation.evaluate",
    "View": "views",
    "calibrate": "calibration.calibrate",
    "calibrate_to_folder": "calibration.calibrate",
    "compare": "measure",
    "evaluate": "measure",
    "load_suite": "suite",
    "measure_drift": "measure",
    "open_family": "family",
    "open_session": "session",
    "register_decoder": "models.architectures",
    "register_encoder": "models.architectures",
    "run_sweep": "sweep",
    "select": "selection.choose",
    "task_vector_cosines": "drift.task_vectors",
}

__all__ = [
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
    "register_decoder",
    "register_encoder",
    "run_sweep",
    "select",
    "task_vector_cosines",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'featcal' has no attribute '{name}'")
    return getattr(import_module(f"featcal.{_HOME[name]}"), name)
