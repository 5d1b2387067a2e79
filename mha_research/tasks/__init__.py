"""Tasks and their data. A task knows nothing of attention or of models."""

from mha_research.tasks.char_lm import CharLM
from mha_research.tasks.retrieval import Retrieval, RetrievalSpec
from mha_research.tasks.synthetic import copy, induction
from mha_research.tasks.task import Evaluation, Example, Task, TaskError, TaskSpec, random_batches

__all__ = [
    "CharLM",
    "Evaluation",
    "Example",
    "Retrieval",
    "RetrievalSpec",
    "Task",
    "TaskError",
    "TaskSpec",
    "copy",
    "induction",
    "random_batches",
]
