"""From a config to a trained, checkpointed, measured run."""

from mha_research.training.build import build_model, build_task
from mha_research.training.cache import use_compilation_cache
from mha_research.training.checkpoint import CheckpointError, Checkpoints
from mha_research.training.files import WorkdirError
from mha_research.training.interrupt import Interrupted
from mha_research.training.loop import check, train
from mha_research.training.rehearsal import rehearse
from mha_research.training.workdir import Result, make_folder, read_result

__all__ = [
    "CheckpointError",
    "Checkpoints",
    "Interrupted",
    "Result",
    "WorkdirError",
    "build_model",
    "build_task",
    "check",
    "make_folder",
    "read_result",
    "rehearse",
    "train",
    "use_compilation_cache",
]
