"""From a config to a trained, checkpointed, measured run."""

from mha_research.training.compilation_cache import use_compilation_cache
from mha_research.training.dry_run import dry_run
from mha_research.training.interrupt import Interrupted
from mha_research.training.loop import check, train

__all__ = ["Interrupted", "check", "dry_run", "train", "use_compilation_cache"]
