"""Attention modules: projections, positions, initialisers, DropHead and decoding around `mha_kernels`."""

from mha_research.attention import initializers, positions
from mha_research.attention.adapter import Adapter
from mha_research.attention.cache import DecodeCache
from mha_research.attention.drop_head import DropHead, HeadImportance, update_importance
from mha_research.attention.multi_head import MultiHeadAttention
from mha_research.attention.position_schemes import Alibi, Position, RelativeBias, Rotary

__all__ = [
    "Adapter",
    "Alibi",
    "DecodeCache",
    "DropHead",
    "HeadImportance",
    "MultiHeadAttention",
    "Position",
    "RelativeBias",
    "Rotary",
    "initializers",
    "positions",
    "update_importance",
]
