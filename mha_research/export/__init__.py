"""Runs for others: the trackers of experiments, and parameters in safetensors files."""

from mha_research.export.record import ExportError
from mha_research.export.trackers import TRACKERS, Exported, export_runs

__all__ = ["TRACKERS", "ExportError", "Exported", "export_runs"]
