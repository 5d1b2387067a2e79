"""`head_gram` against the maps themselves, in float64 NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mha_kernels as mk
from mha_kernels.blockwise import gram
from tests.mha_kernels import oracle
from tests.mha_kernels.problems import normal

B, Q, K, H, G, E = 2, 7, 11, 4, 2, 3


@pytest.mark.parametrize("tile", [256, 3])
def test_it_is_the_inner_product_of_maps(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gram, "TILE", tile)
    gram.gram.clear_cache()
    query, key = normal(0, B, Q, H, E), normal(1, B, K, G, E)
    keep = np.arange(K)[None] < np.array([[K], [6]])
    slopes, sink = np.float32(abs(normal(2, H))), np.float32(normal(3, H))
    i, j = np.arange(Q)[:, None], np.arange(K)[None]
    value = np.zeros((B, K, G, 1))
    p = oracle.attend(
        query,
        key,
        value,
        allowed=(j <= i + 3) & keep[:, None, None],
        bias=-slopes[:, None, None] * abs(i - j),
        sink=sink,
        softcap=2.0,
    ).p
    found = mk.head_gram(
        jnp.float32(query),
        jnp.float32(key),
        mask=mk.CausalMask(3) & mk.KeyPaddingMask(jnp.asarray(keep)),
        bias=mk.AlibiBias(jnp.asarray(slopes)),
        sink=jnp.asarray(sink),
        softcap=2.0,
    )
    gram.gram.clear_cache()
    assert found.shape == (B, H, H)
    np.testing.assert_allclose(found, np.einsum("baij,bcij->bac", p, p), rtol=1e-5)


@pytest.mark.parametrize("name", ["head_gate", "dropout"])
def test_what_acts_after_the_softmax_is_refused(name: str) -> None:
    x = jnp.ones((1, 2, 1, 1))
    given: dict[str, Any] = {"head_gate": jnp.ones(1), "dropout": mk.Dropout(0.1, jax.random.key(0))}
    for function in (mk.head_gram, mk.attention_weights):
        with pytest.raises(TypeError, match=f"takes no {name}"):
            function(x, x, **{name: given[name]})
