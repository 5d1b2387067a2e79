"""FAVOR+: softmax attention estimated by random features, O(L m) in place of O(L^2). Choromanski et al. 2021."""

from __future__ import annotations

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from mha_research.attention import initializers

Kind = Literal["positive", "hyperbolic", "trigonometric"]
Features = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
KINDS = ("positive", "hyperbolic", "trigonometric")
CHUNK = 64


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


def guarded(denominator: jax.Array) -> jax.Array:
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


def pair_products(
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
    return numerator / guarded(denominator)[..., None]


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
        kernel = pair_products(q_log, q_sign, k_log, k_sign, jnp.where(real[..., None], own, 0))
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
        return (last, summed), total[..., :-1] / guarded(total[..., -1:])

    sums = jnp.zeros((batch, heads, features, width + 1), value.dtype)
    start = (jnp.full((batch, heads), -jnp.inf, value.dtype), sums)
    parts = tuple(cut(x) for x in (query_log, query_sign, key_log, key_sign, ones, keep))
    _, output = jax.lax.scan(jax.checkpoint(step), start, parts)
    return output.swapaxes(0, 1).reshape(batch, length + extra, heads, width)[:, :length]
