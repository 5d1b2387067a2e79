"""Performer: softmax attention estimated by random features, O(L m) in place of O(L^2)."""

from __future__ import annotations

import math
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import nnx

import mha_kernels
from mha_kernels import CausalMask, KeyPaddingMask, Mask
from mha_research.attention.kind import NO_SEGMENT_MASK, POSITION, AllowedValues
from mha_research.attention.arguments import as_padding, check_integers, check_numbers
from mha_research.attention.multi_head import MultiHeadAttention
from mha_research.attention.options import HeadOptions, gated
from mha_research.attention.performer import (
    KINDS,
    Features,
    Kind,
    causal_estimate,
    full_estimate,
    guarded,
    log_features,
    orthogonal_projection,
    pair_products,
)


class RandomFeatures(nnx.Variable):
    """The projection (m, E) of a `PerformerAttention`, or the key data that it draws projections from."""


class PerformerAttention(MultiHeadAttention):
    """o_i = phi(q_i) . sum_j phi(k_j) v_j / phi(q_i) . sum_j phi(k_j), with q and k times sqrt(scale). Choromanski et
    al. 2021.

    An estimate of softmax attention whose error is sqrt((exp(|q+k|^2 scale) - 1) / m) of an entry with positive
    features: large unless queries and keys are small. O(L m (E + V)) time, and O(L m) memory, causal included (prefix
    sums over chunks of 64). Every exponential is shifted by the largest so far, so none overflows and no later key is
    seen; the trigonometric estimate may have a denominator near zero, where it is guarded but means nothing.

    Args:
        num_features: random features m
        feature_kind: of the random features, see `favor_features`
        orthogonal: random directions orthogonal in blocks of the head width
        redraw_every: updates after which features are drawn anew, a pure function of the call's `step`; evaluations use
            the first; never unless given

    Masks are None, `CausalMask()` and key padding, joined or not. Raises ValueError for others, for biases, and for
    dropout of probabilities, sinks, softcap and a bias key, none of which an estimate has. `decode` and
    `return_weights` form the estimate of each probability, O(Q K).
    """

    allowed = (
        NO_SEGMENT_MASK,
        AllowedValues(POSITION, ("none", "rotary"), "nothing can be added to scores that are never formed"),
        AllowedValues(
            "model.attention.implementation", ("auto", "reference"), "it has an implementation of its own"
        ),
    )

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *sizes: Any,
        num_features: Annotated[int, "[1, inf)"] = 256,
        feature_kind: Kind = "positive",
        orthogonal: bool = True,
        redraw_every: Annotated[int | None, "[1, inf)"] = None,
        rngs: nnx.Rngs,
        **choices: Any,
    ):
        for name in ("dropout_rate", "sink", "softcap", "add_bias_kv", "add_zero_attention"):
            if choices.get(name):
                raise ValueError(f"PerformerAttention takes no {name}")
        check_integers("PerformerAttention", num_features=num_features, redraw_every=redraw_every)
        if feature_kind not in KINDS:
            raise ValueError(f"PerformerAttention: feature_kind must be one of {KINDS}, got {feature_kind!r}")
        super().__init__(in_features, num_heads, *sizes, rngs=rngs, **choices)
        check_numbers("PerformerAttention", positive=True, scale=self.scale)
        self.num_features, self.feature_kind = num_features, feature_kind
        self.orthogonal, self.redraw_every = orthogonal, redraw_every
        key = rngs.params()
        # Redrawn ones are a function of key and step and cost a factorisation a step; one that stays is drawn here.
        self.features = RandomFeatures(self._draw(key) if redraw_every is None else jax.random.key_data(key))

    def projection(self, step: int | jax.Array | None = None) -> jax.Array:
        """The random projection (m, E) in use at a training step, of the parameters' type but at least float32."""
        if self.redraw_every is None:
            return self.features[...]
        key = jax.random.wrap_key_data(self.features[...])
        return self._draw(jax.random.fold_in(key, jnp.asarray(0 if step is None else step) // self.redraw_every))

    def _draw(self, key: jax.Array) -> jax.Array:
        dtype = jnp.promote_types(self.param_dtype, jnp.float32)
        if self.orthogonal:
            return orthogonal_projection(key, self.num_features, self.head_dim, dtype)
        return jax.random.normal(key, (self.num_features, self.head_dim), dtype)

    def _features(self, query: jax.Array, key: jax.Array, options: HeadOptions) -> Features:
        """(log, sign) features of query (B, Q, H, M) and key (B, K, H, M)."""
        if options.bias is not None:
            raise ValueError(
                "PerformerAttention: a bias cannot be added to an estimate, got one (or a position that adds one)"
            )
        projection = self.projection(options.step)
        root = math.sqrt(self.scale)
        key = jnp.repeat(key, self.num_heads // key.shape[2], axis=2)
        return (*log_features(root * query, projection, self.feature_kind), *log_features(root * key, projection, self.feature_kind))

    def attend(self, query: jax.Array, key: jax.Array, value: jax.Array, options: HeadOptions) -> jax.Array:
        keep, causal = _read_mask(options.mask, (key.shape[0], key.shape[1]))
        value = jnp.repeat(value, self.num_heads // value.shape[2], axis=2)
        if _is_start(options.origin.query):
            key, value = (jnp.where(keep[..., None, None], x, 0) for x in (key, value))
            features = self._features(query, key, options)
            estimate = causal_estimate if causal else full_estimate
            heads = estimate(*features, value.astype(features[0].dtype), keep)
        else:
            value = mha_kernels.dense(query, key, mask=options.mask, origin=options.origin).used(value)
            heads = jnp.einsum("bhqk,bkhv->bqhv", self.weights(query, key, value, options), value)
        return gated(heads, options.head_gate).astype(query.dtype)

    def weights(self, query: jax.Array, key: jax.Array, value: jax.Array, options: HeadOptions) -> jax.Array:
        """The estimate of every probability (B, H, Q, K); trigonometric features may give negative ones."""
        problem = mha_kernels.dense(query, key, mask=options.mask, origin=options.origin)
        allowed = jnp.ones(problem.shape, bool) if problem.attendable is None else problem.attendable
        key = problem.used(key)
        query_log, query_sign, key_log, key_sign = self._features(query, key, options)
        top = jnp.max(key_log, axis=-1)  # (B, K, H): each key by its own largest feature
        kernel = pair_products(query_log, query_sign, key_log, key_sign, top)
        by_key = jnp.where(allowed, top.swapaxes(1, 2)[:, :, None], -jnp.inf)
        largest = jnp.max(by_key, axis=-1, keepdims=True)
        kernel = jnp.where(allowed, kernel * jnp.exp(by_key - jnp.where(largest > -jnp.inf, largest, 0)), 0)
        return kernel / guarded(jnp.sum(kernel, axis=-1, keepdims=True))


def _is_start(query_origin: Any) -> bool:
    return isinstance(query_origin, int) and query_origin == 0


def _read_mask(mask: Mask | None, shape: tuple[int, int]) -> tuple[jax.Array, bool]:
    """Key padding (B, K) and whether the mask is causal. Raises ValueError for any other mask."""
    keep, causal = jnp.ones(shape, bool), False
    for part in () if mask is None else mask.parts():
        if isinstance(part, KeyPaddingMask):
            keep = keep & as_padding(part.keep, *shape)
        elif isinstance(part, CausalMask) and isinstance(part.offset, int) and part.offset == 0:
            causal = True
        else:
            raise ValueError(
                f"PerformerAttention: mask must be CausalMask(), key padding or both, got {type(part).__name__}"
            )
    return keep, causal
