"""Relative biases as lines of distances, and the rows that a mask uses, against what is written out entry by entry."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mha_kernels as mk
from mha_kernels.algebra.operands import Tile, lookup_by_gather
from mha_kernels.algebra.spec import AttentionSpec, Positions
from mha_kernels.algebra.tile import attended_rows
from tests.mha_kernels.problems import normal


class KerpleBias(mk.RelativeBias):
    """-strength log(1 + rate |i - j|); Chi et al. 2022, eq. 7."""

    strength: jax.Array = mk.axes("H")
    rate: jax.Array = mk.axes("H")

    def of_distance(self, distance: jax.Array, lookup: Any) -> jax.Array:
        return -self.strength * jnp.log1p(self.rate * jnp.abs(distance))


@pytest.mark.parametrize("query_tile, key_tile", [(4, 8), (16, 8), (13, 19)])
def test_a_relative_bias_of_ones_own(query_tile: int, key_tile: int, x64: None) -> None:
    """Values and gradients equal those of the same numbers as a dense array, written out by NumPy."""
    query, key, value = normal(0, 2, 13, 3, 5), normal(1, 2, 19, 3, 5), normal(2, 2, 19, 3, 5)
    strength, rate = np.array([0.5, 1.0, 2.0]), np.array([1.0, 0.3, 0.1])
    distance = np.abs(np.arange(19)[None] - np.arange(13)[:, None])[None]
    log = np.log1p(rate[:, None, None] * distance)
    tiles = mk.Blockwise(query_tile, key_tile)

    def loss(bias: mk.Bias) -> jax.Array:
        return (mk.attention(query, key, value, bias=bias, implementation=tiles) ** 2).sum()

    found, gradient = jax.value_and_grad(loss)(KerpleBias(jnp.asarray(strength), jnp.asarray(rate)))
    expected, dense = jax.value_and_grad(loss)(mk.DenseBias(jnp.asarray(-strength[:, None, None] * log)[None]))
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    of_rate = -strength[:, None, None] * distance / (1 + rate[:, None, None] * distance)
    np.testing.assert_allclose(gradient.strength, (dense.values[0] * -log).sum((1, 2)), rtol=1e-10)
    np.testing.assert_allclose(gradient.rate, (dense.values[0] * of_rate).sum((1, 2)), rtol=1e-10)


@pytest.mark.parametrize("origin", [mk.Origin(), mk.Origin(query=7), mk.Origin(query=3, key=11)])
def test_lines_follow_the_origin(origin: mk.Origin, x64: None) -> None:
    """The table entry that each pair reads, found by a bias that is one at a single distance."""
    query, key, value = jnp.zeros((1, 11, 1, 2)), jnp.zeros((1, 17, 1, 2)), normal(0, 1, 17, 1, 3)
    table = jnp.asarray(20.0 * np.eye(1, 21, 13))  # ClippedBias: distance 3
    found = mk.attention(
        query, key, value, bias=mk.ClippedBias(table), origin=origin, implementation=mk.Blockwise(8, 8)
    )
    distance = np.arange(17)[None] + origin.key - np.arange(11)[:, None] - origin.query
    scores = np.where(distance == 3, 20.0, 0.0)
    weights = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    np.testing.assert_allclose(found[0, :, 0], weights @ np.asarray(value)[0, :, 0], rtol=1e-12)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "mask",
    [
        mk.CausalMask(),
        mk.CausalMask(-4),
        mk.CausalMask(5),
        mk.WindowMask(2, 1),
        mk.WindowMask(3, None),
        mk.WindowMask(-2, 5),
        mk.WindowMask(-3, -1),
        mk.WindowMask(-3, 1),
        mk.CausalMask() & mk.WindowMask(2, None),
    ],
)
def test_the_rows_a_mask_uses(mask: mk.Mask, padded: bool, x64: None) -> None:
    """Rows in an allowed pair, on tiles above, on and below the diagonal, against the mask written out."""
    for first_q, first_k in [(0, 0), (8, 0), (0, 5), (3, 2), (0, 12)]:
        query, key = first_q + jnp.arange(7).reshape(1, 7, 1), first_k + jnp.arange(5).reshape(1, 1, 5)
        ends = (first_k + 4, first_q + 5) if padded else (None, None)
        at = Tile(0, 0, query, key, (first_q, first_q + 6), (first_k, first_k + 4), lookup_by_gather, *ends)
        algebra = AttentionSpec(Positions(0, 0, 0, 0), 1.0, None, mask, None, None, None, None)
        allowed = np.asarray(mask.allowed(at)) & np.ones((1, 7, 5), bool)
        if padded:
            allowed = allowed & np.asarray(key < ends[0]) & np.asarray(query < ends[1])
        queries, keys = attended_rows(at, algebra, (1, 7, 5))
        np.testing.assert_array_equal(np.broadcast_to(queries, (1, 7, 1))[..., 0], allowed.any(2))
        np.testing.assert_array_equal(np.broadcast_to(keys, (1, 5, 1))[..., 0], allowed.any(1))
