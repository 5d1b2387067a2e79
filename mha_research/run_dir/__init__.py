"""What lies in a run's directory: its config, checkpoints, metrics, events, provenance and result."""

from mha_research.run_dir.checkpoint import CheckpointError, Checkpoints
from mha_research.run_dir.files import WorkdirError
from mha_research.run_dir.workdir import Result, make_folder, read_result

__all__ = ["CheckpointError", "Checkpoints", "Result", "WorkdirError", "make_folder", "read_result"]
