"""Dropout decides by position alone: the same entries on every implementation, tile size and part of a whole."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mha_kernels as mk
from mha_kernels.pallas.tpu.forward import PallasTPU
from tests.mha_kernels.problems import kept

SHAPE = (2, 3, 11, 13)
HERE = mk.Origin()


def decisions(rate: float, seed: int, shape: Any = SHAPE, origin: Any = HERE, implementation: Any = "reference") -> Any:
    return kept(mk.Dropout(rate, jax.random.key(seed)), shape, origin, implementation) > 0


TILED = [*(mk.Blockwise(*tiles) for tiles in ((1, 13), (4, 5), (11, 2))), PallasTPU(128, 128, interpret=True)]


@settings(max_examples=15)
@given(seed=st.integers(0, 2**31 - 1), origin=st.builds(mk.Origin, *[st.integers(0, 2**20)] * 4))
def test_every_implementation_and_tile_size_drops_the_same_entries(seed: int, origin: mk.Origin) -> None:
    expected = decisions(0.4, seed, origin=origin)
    for implementation in TILED:
        np.testing.assert_array_equal(decisions(0.4, seed, SHAPE, origin, implementation), expected)


def test_a_part_drops_what_the_whole_does() -> None:
    whole = decisions(0.4, 0)
    part = decisions(0.4, 0, (1, 2, 5, 7), mk.Origin(batch=1, head=1, query=6, key=3))
    np.testing.assert_array_equal(part, whole[1:, 1:3, 6:11, 3:10])


def test_the_backward_pass_drops_what_the_forward_pass_did() -> None:
    """With even weights dv[j] = sum_i keep_ij / ((1 - rate) K): the column sums of the decisions."""
    keep = decisions(0.4, 0)
    b, h, queries, keys = SHAPE
    query, key = jnp.zeros((b, queries, h, 1)), jnp.zeros((b, keys, h, 1))
    dropout = mk.Dropout(0.4, jax.random.key(0))
    options: dict[str, Any] = {"dropout": dropout, "implementation": mk.Blockwise(4, 5)}
    gradient = jax.jit(jax.grad(lambda value: mk.attention(query, key, value, **options).sum()))(key)
    np.testing.assert_allclose(gradient[..., 0].swapaxes(1, 2), keep.sum(2) / 0.6 / keys, rtol=1e-5)


def test_keep_rate_and_independence() -> None:
    """190,000 decisions: the rate, the rates along each axis, neighbours and seeds, each within five sigma."""
    shape = (5, 6, 64, 100)
    for rate in (0.1, 0.5):
        keep = decisions(rate, 1, shape)
        noise = 5 * (rate * (1 - rate)) ** 0.5
        assert abs(keep.mean() - (1 - rate)) < noise / keep.size**0.5
        for axis, size in enumerate(shape):
            others = tuple(n for n in range(4) if n != axis)
            assert np.abs(keep.mean(others) - (1 - rate)).max() < noise / (keep.size / size) ** 0.5
            centred = keep - keep.mean()
            neighbours = (np.delete(centred, 0, axis) * np.delete(centred, -1, axis)).mean()
            assert abs(neighbours) < noise**2 / 5 / keep.size**0.5 * 1.2
        other = decisions(rate, 2, shape)
        assert abs(((keep - keep.mean()) * (other - other.mean())).mean()) < noise**2 / 5 / keep.size**0.5


def test_the_ends_of_the_rate() -> None:
    query = jnp.ones((1, 2, 1, 1))
    assert (mk.attention(query, query, query, dropout=mk.Dropout(1.0, jax.random.key(0))) == 0).all()
    assert (mk.attention(query, query, query, dropout=mk.Dropout(0.0, None)) == 1).all()
    for rate in (-0.1, float("nan"), 1.5, True, "0.1"):
        with pytest.raises(ValueError, match=f"dropout rate is {rate!r}"):
            mk.Dropout(rate, jax.random.key(0))  # type: ignore[arg-type]
    for key in (None, 3, jnp.zeros(3)):
        with pytest.raises(TypeError, match="dropout key is"):
            mk.attention(query, query, query, dropout=mk.Dropout(0.5, key))
    with pytest.raises(TypeError, match=r"dropout is 0\.5; expected a Dropout\(rate, key\)"):
        mk.attention(query, query, query, dropout=0.5)


def test_typed_and_raw_keys_decide_alike() -> None:
    typed = mk.Dropout(0.4, jax.random.key(5))
    raw = mk.Dropout(0.4, jax.random.key_data(jax.random.key(5)))
    np.testing.assert_array_equal(*(kept(d, SHAPE, HERE, "reference") for d in (typed, raw)))
