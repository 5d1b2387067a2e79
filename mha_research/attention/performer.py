"""Performer: softmax attention estimated by random features, O(L m) in place of O(L^2)."""

from __future__ import annotations

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

import mha_kernels
from mha_kernels import CausalMask, KeyPaddingMask, Mask
from mha_research.attention import initializers
from mha_research.attention.arguments import as_padding, check_integers, check_numbers
from mha_research.attention.multi_head import MultiHeadAttention
from mha_research.attention.options import HeadOptions, gated

Kind = Literal["positive", "hyperbolic", "trigonometric"]
Features = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
KINDS = ("positive", "hyperbolic", "trigonometric")
CHUNK = 64


class RandomFeatures(nnx.Variable):
    """The projection (m, E) of a `PerformerAttention`, or the key data that it draws projections from."""


def orthogonal_projection(key: jax.Array, num_features: int, width: int, dtype: Any = jnp.float32) -> jax.Array:
    """(m, E) rows ~ N(0, I), orthogonal in blocks of E: each row is a Haar direction times an independent chi_E
    norm.
    """
    direction_key, norm_key = jax.random.split(key)
    keys = jax.random.split(direction_key, math.ceil(num_features / width))
    haar = initializers.orthogonal()
    directions = jax.vmap(lambda k: haar(k, (width, width), dtype))(keys).reshape(-1, width)[:num_features]
    norms = jnp.linalg.norm(jax.random.normal(norm_key, (num_features, width), dtype), axis=-1, keepdims=True)
    return directions * norms


def log_features(x: jax.Array, projection: jax.Array, kind: Kind) -> tuple[jax.Array, jax.Array]:
    """Features as sign * exp(log): (log, sign), both (..., M). Kept apart so that the exponentials can be shifted
    together.
    """
    if kind not in KINDS:
        raise ValueError(f"favor_features: kind must be one of {KINDS}, got {kind!r}")
    compute = jnp.promote_types(x.dtype, jnp.float32)
    x = x.astype(compute)
    projected = jnp.einsum("...e,me->...m", x, projection.astype(compute))
    half_norm = jnp.sum(x**2, axis=-1, keepdims=True) / 2
    count = projection.shape[0]
    if kind == "trigonometric":
        waves = jnp.concatenate([jnp.cos(projected), jnp.sin(projected)], axis=-1)
        return jnp.broadcast_to(half_norm - math.log(count) / 2, waves.shape), waves
    if kind == "hyperbolic":
        projected, count = jnp.concatenate([projected, -projected], axis=-1), 2 * count
    logs = projected - half_norm - math.log(count) / 2
    return logs, jnp.ones_like(logs)


def favor_features(x: jax.Array, projection: jax.Array, kind: Kind = "positive") -> jax.Array:
    """phi(x) with E[phi(x) . phi(y)] = exp(x . y) over rows w ~ N(0, I) of the projection; x (..., E), projection (m,
    E).

    positive: m^-1/2 exp(w.x - |x|^2/2), (..., m). hyperbolic: (2m)^-1/2 of the same with w and -w, (..., 2 m).
    trigonometric: m^-1/2 exp(|x|^2/2) [cos w.x, sin w.x], (..., 2 m), which may be negative. At least float32. The mean
    squared errors are those of Choromanski et al. 2021, lemma 2. Raises ValueError for another kind.
    """
    logs, sign = log_features(x, projection, kind)
    return sign * jnp.exp(logs)


class PerformerAttention(MultiHeadAttention):
    """o_i = phi(q_i) . sum_j phi(k_j) v_j / phi(q_i) . sum_j phi(k_j), with q and k times sqrt(scale). Choromanski et
    al. 2021.

    An estimate of softmax attention whose error is sqrt((exp(|q+k|^2 scale) - 1) / m) of an entry with positive
    features: large unless queries and keys are small. O(L m (E + V)) time, and O(L m) memory, causal included (prefix
    sums over chunks of 64). Every exponential is shifted by the largest so far, so none overflows and no later key is
    seen; the trigonometric estimate may have a denominator near zero, where it is guarded but means nothing.

    Args beside those of `MultiHeadAttention`:
      num_features: m, 256 in the paper's code. kind: of `favor_features`. orthogonal: rows orthogonal in blocks of E.
      redraw_every: a new projection after this many steps of the call's `step`, a pure function of the two; None keeps
        one.

    Masks are None, `CausalMask()` and key padding, joined or not. Raises ValueError for others, for biases, and for
    dropout of probabilities, sinks, softcap and a bias key, none of which an estimate has. `decode` and
    `return_weights` form the estimate of each probability, O(Q K).
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *sizes: Any,
        num_features: int = 256,
        kind: Kind = "positive",
        orthogonal: bool = True,
        redraw_every: int | None = None,
        rngs: nnx.Rngs,
        **choices: Any,
    ):
        for name in ("dropout_rate", "sink", "softcap", "add_bias_kv", "add_zero_attention"):
            if choices.get(name):
                raise ValueError(f"PerformerAttention takes no {name}")
        check_integers("PerformerAttention", num_features=num_features, redraw_every=redraw_every)
        if kind not in KINDS:
            raise ValueError(f"PerformerAttention: kind must be one of {KINDS}, got {kind!r}")
        super().__init__(in_features, num_heads, *sizes, rngs=rngs, **choices)
        check_numbers("PerformerAttention", positive=True, scale=self.scale)
        self.num_features, self.kind, self.orthogonal, self.redraw_every = num_features, kind, orthogonal, redraw_every
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
        return (*log_features(root * query, projection, self.kind), *log_features(root * key, projection, self.kind))

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
        kernel = _pairs(query_log, query_sign, key_log, key_sign, top)
        by_key = jnp.where(allowed, top.swapaxes(1, 2)[:, :, None], -jnp.inf)
        largest = jnp.max(by_key, axis=-1, keepdims=True)
        kernel = jnp.where(allowed, kernel * jnp.exp(by_key - jnp.where(largest > -jnp.inf, largest, 0)), 0)
        return kernel / _guard(jnp.sum(kernel, axis=-1, keepdims=True))


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


def _guard(denominator: jax.Array) -> jax.Array:
    """The denominator, its sign kept, at least 1e-12 in size, so that its inverse has a finite gradient; 1 where it is
    0.
    """
    small = 1e-12 * jnp.sign(denominator)
    return jnp.where(denominator == 0, 1, jnp.where(jnp.abs(denominator) < 1e-12, small, denominator))


def _shifted(log: jax.Array, sign: jax.Array, top: jax.Array) -> jax.Array:
    return sign * jnp.exp(log - jax.lax.stop_gradient(top))


def _query_features(log: jax.Array, sign: jax.Array) -> jax.Array:
    """Any factor of a query cancels between numerator and denominator, so each is shifted by its own largest
    feature.
    """
    return _shifted(log, sign, jnp.max(log, axis=-1, keepdims=True))


def _pairs(
    query_log: jax.Array, query_sign: jax.Array, key_log: jax.Array, key_sign: jax.Array, top: jax.Array
) -> jax.Array:
    """phi(q_i) . phi(k_j) (B, H, Q, K), up to a factor of each query and exp(-top) (B, K, H) of each key."""
    key = key_sign * jnp.exp(key_log - top[..., None])
    return jnp.einsum("bqhm,bkhm->bhqk", _query_features(query_log, query_sign), key)


def full_estimate(
    query_log: jax.Array,
    query_sign: jax.Array,
    key_log: jax.Array,
    key_sign: jax.Array,
    value: jax.Array,
    keep: jax.Array,
) -> jax.Array:
    """Head outputs (B, Q, H, V) over all kept keys; features (B, L, H, M), value (B, K, H, V), keep (B, K)."""
    key_log = jnp.where(keep[..., None, None], key_log, -jnp.inf)
    top = jnp.max(key_log, axis=(1, 3), keepdims=True)
    key = _shifted(key_log, key_sign, jnp.where(top > -jnp.inf, top, 0))
    query = _query_features(query_log, query_sign)
    numerator = jnp.einsum("bqhm,bhmv->bqhv", query, jnp.einsum("bkhm,bkhv->bhmv", key, value))
    denominator = jnp.einsum("bqhm,bhm->bqh", query, jnp.sum(key, axis=1))
    return numerator / _guard(denominator)[..., None]


def causal_estimate(
    query_log: jax.Array,
    query_sign: jax.Array,
    key_log: jax.Array,
    key_sign: jax.Array,
    value: jax.Array,
    keep: jax.Array,
) -> jax.Array:
    """As `full_estimate` over the kept keys up to each query: sums of earlier chunks are carried, pairs inside one are
    formed.

    The shift at position i is the largest log feature of the keys up to i, so nothing depends on a later key.
    """
    batch, length, heads, _ = query_log.shape
    if key_log.shape[1] != length:
        raise ValueError(
            f"PerformerAttention: causal needs as many keys as queries, got {key_log.shape[1]} and {length}"
        )
    chunk = min(CHUNK, length)
    extra = -length % chunk

    def cut(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, extra)) + ((0, 0),) * (x.ndim - 2))
        return x.reshape(batch, -1, chunk, *x.shape[2:]).swapaxes(0, 1)

    features, width = key_log.shape[-1], value.shape[-1]
    ones = jnp.concatenate([value, jnp.ones((*value.shape[:-1], 1), value.dtype)], axis=-1)  # the last entry counts

    def step(
        carry: tuple[jax.Array, jax.Array], part: tuple[jax.Array, ...]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        before, summed = carry  # (B, H) shift of the sums, (B, H, M, V + 1)
        q_log, q_sign, k_log, k_sign, v, real = part
        own = jnp.where(real[..., None], jax.lax.stop_gradient(jnp.max(k_log, axis=-1)), -jnp.inf)
        shift = jnp.maximum(before[:, None], jax.lax.cummax(own, axis=1))  # (B, C, H)
        safe = jnp.where(shift > -jnp.inf, shift, 0)
        kernel = _pairs(q_log, q_sign, k_log, k_sign, jnp.where(real[..., None], own, 0))
        past = jnp.tri(chunk, dtype=bool)[None, :, :, None]
        moved = jnp.exp(jnp.where(past, own[:, None] - safe[:, :, None], -jnp.inf))  # (B, C query, C key, H)
        kernel = kernel * jnp.moveaxis(moved, 3, 1)
        inside = jnp.einsum("bhqk,bkhv->bqhv", kernel, v)
        earlier = jnp.einsum("bqhm,bhmv->bqhv", _query_features(q_log, q_sign), summed)
        total = inside + earlier * jnp.exp(before[:, None] - safe)[..., None]
        last = shift[:, -1]
        last_safe = jnp.where(last > -jnp.inf, last, 0)
        key = jnp.where(real[..., None, None], k_sign * jnp.exp(k_log - last_safe[:, None, :, None]), 0)
        summed = summed * jnp.exp(before - last_safe)[..., None, None] + jnp.einsum("bkhm,bkhv->bhmv", key, v)
        return (last, summed), total[..., :-1] / _guard(total[..., -1:])

    sums = jnp.zeros((batch, heads, features, width + 1), value.dtype)
    start = (jnp.full((batch, heads), -jnp.inf, value.dtype), sums)
    parts = tuple(cut(x) for x in (query_log, query_sign, key_log, key_sign, ones, keep))
    _, output = jax.lax.scan(jax.checkpoint(step), start, parts)
    return output.swapaxes(0, 1).reshape(batch, length + extra, heads, width)[:, :length]
