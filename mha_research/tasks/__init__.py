"""Tasks and their data. A task knows nothing of attention or of models."""

from collections.abc import Callable

from mha_research.tasks.char_lm import CharLM
from mha_research.tasks.retrieval import Retrieval, RetrievalSpec
from mha_research.tasks.synthetic import copy, induction
from mha_research.tasks.task import Evaluation, Task, TaskError, TaskSpec

TASKS: dict[str, Callable[..., Task]] = {
    "char_lm": CharLM,
    "copy": copy,
    "induction": induction,
    "retrieval": Retrieval,
}

__all__ = [
    "TASKS",
    "CharLM",
    "Evaluation",
    "Retrieval",
    "RetrievalSpec",
    "Task",
    "TaskError",
    "TaskSpec",
    "copy",
    "induction",
]
