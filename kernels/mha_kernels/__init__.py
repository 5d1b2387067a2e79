"""The attention algebra: every variant written once, as a function on a tile, and run by every implementation.

Arrays are laid out as in `jax.nn.dot_product_attention`: query (B, Q, H, E), key (B, K, G, E), value (B, K, G, V).
"""

from mha_kernels.algebra.biases import (
    AlibiBias,
    Bias,
    ClippedBias,
    DenseBias,
    DistanceBias,
    RelativeBias,
    T5Bias,
    alibi_slopes,
    t5_bucket,
)
from mha_kernels.algebra.dropout import Dropout
from mha_kernels.algebra.masks import CausalMask, DenseMask, KeyPaddingMask, Mask, SegmentMask, WindowMask
from mha_kernels.algebra.operands import Tile, axes
from mha_kernels.algebra.spec import STATISTICS, HeadStatistics, Origin
from mha_kernels.api import attention, attention_weights, attention_with_statistics, dense, explain, head_gram
from mha_kernels.blockwise import Blockwise
from mha_kernels.dispatch import Plan
from mha_kernels.jax_nn_api import dot_product_attention
from mha_kernels.pallas.gpu.forward import PallasGPU
from mha_kernels.pallas.tpu.forward import PallasTPU
from mha_kernels.reference import Dense
from mha_kernels.sharding import sharded

__all__ = [
    "STATISTICS",
    "AlibiBias",
    "Bias",
    "Blockwise",
    "CausalMask",
    "ClippedBias",
    "Dense",
    "DenseBias",
    "DenseMask",
    "DistanceBias",
    "Dropout",
    "HeadStatistics",
    "KeyPaddingMask",
    "Mask",
    "Origin",
    "PallasGPU",
    "PallasTPU",
    "Plan",
    "RelativeBias",
    "SegmentMask",
    "T5Bias",
    "Tile",
    "WindowMask",
    "alibi_slopes",
    "attention",
    "attention_weights",
    "attention_with_statistics",
    "axes",
    "dense",
    "dot_product_attention",
    "explain",
    "head_gram",
    "sharded",
    "t5_bucket",
]
