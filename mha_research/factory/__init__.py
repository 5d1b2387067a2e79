"""From a config to objects: the task, the model with its attention, the optimizer."""

from mha_research.factory.build import build_metrics, build_model, build_task

__all__ = ["build_metrics", "build_model", "build_task"]
