"""Attention modules: projections, positions, initialisers, DropHead and decoding around `mha_kernels`."""

from mha_research.attention import initializers, performer, positions
from mha_research.attention.cache import DecodeCache
from mha_research.attention.drop_head import DropHead, HeadImportance, update_importance
from mha_research.attention.flax_function import flax_attention_fn
from mha_research.attention.layers.adapter import Adapter
from mha_research.attention.multi_head import MultiHeadAttention
from mha_research.attention.positions.schemes import Alibi, Position, RelativeBias, Rotary
from mha_research.attention.trace import trace_attention
from mha_research.attention.variants.collaborative import CollaborativeAttention
from mha_research.attention.variants.conv_value import ConvValueAttention
from mha_research.attention.variants.differential import DifferentialAttention
from mha_research.attention.variants.domain_adapter import DomainAdapter
from mha_research.attention.variants.frame_difference import FrameDifferenceAttention
from mha_research.attention.variants.multi_scale import MultiScaleAttention
from mha_research.attention.variants.performer import PerformerAttention
from mha_research.attention.variants.shaw import ShawAttention
from mha_research.attention.variants.sigmoid import SigmoidAttention
from mha_research.attention.variants.talking_heads import TalkingHeadsAttention

__all__ = [
    "Adapter",
    "Alibi",
    "CollaborativeAttention",
    "ConvValueAttention",
    "DecodeCache",
    "DifferentialAttention",
    "DomainAdapter",
    "DropHead",
    "FrameDifferenceAttention",
    "HeadImportance",
    "MultiHeadAttention",
    "MultiScaleAttention",
    "PerformerAttention",
    "Position",
    "RelativeBias",
    "Rotary",
    "ShawAttention",
    "SigmoidAttention",
    "TalkingHeadsAttention",
    "flax_attention_fn",
    "initializers",
    "performer",
    "positions",
    "trace_attention",
    "update_importance",
]
