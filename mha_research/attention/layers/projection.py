"""Query, key and value projection kept in one matrix."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from mha_research.attention.layers.product import product


class PackedProjection(nnx.Module):
    """[q | k | v] = x [W_Q | W_K | W_V] + [b_Q | b_K | b_V]: one matrix product where the three inputs are one array.

    Made from three projections (D, heads, width), whose parameters it puts side by side: the same start, and slices of
    one gradient. Given different inputs it multiplies each by its own slice.
    """

    def __init__(self, query: nnx.LinearGeneral, key: nnx.LinearGeneral, value: nnx.LinearGeneral):
        parts = (query, key, value)
        self.shapes = tuple(part.out_features for part in parts)
        features = query.in_features[0]
        self.kernel = nnx.Param(jnp.concatenate([p.kernel[...].reshape(features, -1) for p in parts], axis=1))
        biases = [p.bias[...].reshape(-1) for p in parts if p.bias is not None]
        self.bias = nnx.Param(jnp.concatenate(biases)) if biases else None
        self.promote_dtype, self.dtype, self.precision = query.promote_dtype, query.dtype, query.precision

    def _split(self, array: jax.Array) -> list[jax.Array]:
        widths = [math.prod(shape) for shape in self.shapes]
        parts = jnp.split(array, (widths[0], widths[0] + widths[1]), axis=-1)
        return [part.reshape(*array.shape[:-1], *shape) for part, shape in zip(parts, self.shapes)]

    def kernels(self) -> list[jax.Array]:
        """W_Q (D, H, E), W_K (D, G, E) and W_V (D, G, V)."""
        return self._split(self.kernel[...])

    def __call__(self, query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Heads (B, Q, H, E), (B, K, G, E) and (B, K, G, V)."""
        bias = None if self.bias is None else self.bias[...]
        self_attention = query is key is value
        query, key, value, kernel, bias = self.promote_dtype(
            (query, key, value, self.kernel[...], bias), dtype=self.dtype
        )
        if self_attention:
            heads = self._split(product(query, kernel, self.precision))
        else:
            heads = [product(x, part, self.precision) for x, part in zip((query, key, value), self._split(kernel))]
        if bias is not None:
            heads = [h + b[None, None] for h, b in zip(heads, self._split(bias))]
        return heads[0], heads[1], heads[2]
