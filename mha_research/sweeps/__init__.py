"""Ablations as data: a sweep file, its manifest, and the engines that run it."""

from mha_research.analysis.statistics.claims import AllOf, Claim
from mha_research.sweeps.description import Sweep, Tune, chain, product, vary, zipped

__all__ = ["AllOf", "Claim", "Sweep", "Tune", "chain", "product", "vary", "zipped"]
