"""Every attention module with choices that reach its code, for tests that hold all of them to one rule."""

import jax
import jax.numpy as jnp

from mha_kernels import CausalMask
from mha_research import (
    Alibi,
    CollaborativeAttention,
    ConvValueAttention,
    DifferentialAttention,
    DomainAdapter,
    DropHead,
    FrameDifferenceAttention,
    MultiHeadAttention,
    MultiScaleAttention,
    PerformerAttention,
    RelativeBias,
    Rotary,
    ShawAttention,
    SigmoidAttention,
    TalkingHeadsAttention,
    initializers,
)

B, L, D, H = 2, 5, 12, 3
CAUSAL = {"mask": CausalMask()}
DROP_HEAD = DropHead(0.5, "linear", steps=10, importance_power=1.0)
DRAWN = {"query_init": initializers.orthogonal(num_heads=H), "key_init": initializers.svd_decay()}
EVERY = {"normalize_qk": True, "sink": True, "softcap": 5.0, "gate_output": True, "add_zero_attention": True}
# Name: kind, choices beside D and H, what a call is given beside x (B, L, D).
MODULES = {
    "alibi": (MultiHeadAttention, {"position": Alibi(), "num_kv_heads": 1, **DRAWN}, {}),
    "rotary": (MultiHeadAttention, {"position": Rotary(), "adapter_features": 4, **EVERY}, CAUSAL),
    "t5": (MultiHeadAttention, {"position": RelativeBias(num_buckets=8, max_distance=5), "packed": True}, {}),
    "clipped": (MultiHeadAttention, {"position": RelativeBias("clipped", max_distance=2)}, CAUSAL),
    "mimetic": (MultiHeadAttention, {"position": Alibi(trainable=True), "joint_init": initializers.mimetic()}, {}),
    "dropping": (
        MultiHeadAttention,
        {"drop_head": DROP_HEAD, "dropout_rate": 0.3, "add_bias_kv": True},
        {"deterministic": False, "rngs": jax.random.key(3), "step": 7},
    ),
    "performer": (PerformerAttention, {"num_features": 8}, CAUSAL),
    "redrawn": (PerformerAttention, {"num_features": 8, "redraw_every": 2, "kind": "hyperbolic"}, {"step": 5}),
    "waves": (PerformerAttention, {"num_features": 8, "orthogonal": False, "kind": "trigonometric"}, {}),
    "convolution": (ConvValueAttention, {"causal": True}, CAUSAL),
    "grid": (ConvValueAttention, {"grid": [1, L]}, {}),
    "scales": (MultiScaleAttention, {"patch_sizes": (1, 2)}, CAUSAL),
    "frames": (FrameDifferenceAttention, {}, {}),
    "domains": (DomainAdapter, {"num_domains": 3}, {"domain": jnp.array([2, 0])}),
    "talking": (TalkingHeadsAttention, {}, CAUSAL),
    "differential": (
        DifferentialAttention,
        {"drop_head": DropHead(0.5)},
        {"deterministic": False, "rngs": jax.random.key(3)},
    ),
    "collaborative": (CollaborativeAttention, {"position": RelativeBias("distance", max_distance=2)}, {}),
    "shaw": (ShawAttention, {"max_distance": 2}, CAUSAL),
    "sigmoid": (SigmoidAttention, {}, {}),
}
CANNOT_DECODE = {"convolution", "grid", "scales", "frames"}
