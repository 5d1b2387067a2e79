"""`attention_fn=flax_attention_fn` in Flax's own modules, nnx and linen: the same numbers, masks and dropout
included."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mha_research import flax_attention_fn
from tests.mha_research.attention import oracle
from tests.mha_research.attention.helpers import close, normal

B, L, D, H = 2, 5, 12, 4
OURS = functools.partial(flax_attention_fn, implementation="reference")


def nnx_module(function, **choices):
    return nnx.MultiHeadAttention(
        H,
        D,
        decode=False,
        rngs=nnx.Rngs(0),
        bias_init=jax.nn.initializers.normal(0.1),
        attention_fn=function,
        **choices,
    )


@pytest.mark.parametrize("kv", [4, 2])
def test_nnx_modules_give_the_same_output(kv):
    theirs = nnx_module(nnx.dot_product_attention, num_kv_heads=kv)
    ours = nnx_module(OURS, num_kv_heads=kv)
    x = normal(1, B, L, D)
    keep = nnx.make_attention_mask(jnp.ones((B, L)), jnp.arange(L)[None] < jnp.array([[L], [3]]))
    assert keep.dtype == jnp.float32
    for call in ({}, {"is_causal": True}, {"mask": keep}, {"mask": keep.astype(bool), "is_causal": True}):
        close(ours(x, **call), theirs(x, **call))


def test_any_batch_rank_with_masks_that_broadcast():
    ours, x = nnx_module(OURS), normal(1, 3, B, L, D)
    for shape in ((L, L), (1, 1, 1, L, L), (3, 1, H, L, L), (B, 1, 1, L)):
        mask = normal(2, *shape) > -0.5
        mask = mask.at[..., 0].set(True)
        query, key, value = (p(x) for p in (ours.query, ours.key, ours.value))
        # A rate above zero keeps Flax on its own einsums, which broadcast any mask.
        expected = nnx.dot_product_attention(query, key, value, mask=mask, dropout_rate=0.5, deterministic=True)
        close(OURS(query, key, value, mask=mask), expected)
    close(OURS(query[0, 0], key[0, 0], value[0, 0]), OURS(query, key, value)[0, 0])


def test_linen_passes_the_mask_and_dropout_because_the_signature_names_them():
    x = normal(1, B, L, D)
    mask = nn.make_causal_mask(jnp.ones((B, L)))
    theirs, ours = (
        nn.MultiHeadDotProductAttention(H, attention_fn=f, dropout_rate=0.5) for f in (nn.dot_product_attention, OURS)
    )
    variables = theirs.init(jax.random.key(0), x, deterministic=True)
    expected = theirs.apply(variables, x, mask=mask, deterministic=True)
    close(ours.apply(variables, x, mask=mask, deterministic=True), expected)
    drop = functools.partial(ours.apply, variables, x, mask=mask, deterministic=False)
    first, again, other = (drop(rngs={"dropout": jax.random.key(s)}) for s in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.01
    outputs = [drop(rngs={"dropout": jax.random.key(s)}) for s in range(200)]
    assert np.abs(np.mean(outputs, axis=0) - expected).max() < 0.25


def test_weights_are_sown_where_flax_asks_for_them():
    x = normal(1, B, L, D)
    linen = nn.MultiHeadDotProductAttention(H, attention_fn=OURS)
    variables = linen.init(jax.random.key(0), x)
    _, state = linen.apply(variables, x, sow_weights=True, mutable="intermediates")
    (sown,) = state["intermediates"]["attention_weights"]
    _, state = nn.MultiHeadDotProductAttention(H).apply(variables, x, sow_weights=True, mutable="intermediates")
    expected = np.asarray(state["intermediates"]["attention_weights"][0], np.float64)
    close(sown, expected)
    module = nnx_module(OURS)
    _, state = nnx.capture(module, nnx.Intermediate)(x, sow_weights=True)
    query, key = (np.asarray(p(x), np.float64) for p in (module.query, module.key))
    close(nnx.to_pure_dict(state)["attention_weights"][0], oracle.heads(query, key, key, 3**-0.5)[1])


def test_what_cannot_be_done_is_refused_and_an_additive_mask_gives_nothing_plausible():
    q = normal(1, B, L, H, 3)
    with pytest.raises(ValueError, match="needs dropout_rng"):
        flax_attention_fn(q, q, q, dropout_rate=0.5)
    with pytest.raises(ValueError, match="einsums"):
        flax_attention_fn(q, q, q, qk_attn_weights_einsum=jnp.einsum)
    with pytest.raises(ValueError, match="mask has shape"):
        flax_attention_fn(q, q, q, mask=jnp.ones((1, 1, 1, 1, 1)))
    for rate in (float("nan"), -0.1, 1.5):  # flax #5497: a rate that is no rate was no dropout
        with pytest.raises(ValueError, match=rf"dropout_rate must be in \[0, 1\], got {rate}"):
            flax_attention_fn(q, q, q, dropout_rate=rate, deterministic=True)
    with pytest.raises(TypeError, match=r"dropout_rate must be in \[0, 1\], got '0\.5'"):
        flax_attention_fn(q, q, q, dropout_rate="0.5")
    for name in ("mask", "bias"):
        with pytest.raises(ValueError, match=rf"{name} has shape \(5, 1, {L}, {L}\), which does not broadcast"):
            flax_attention_fn(q, q, q, **{name: jnp.ones((5, 1, L, L))})
        with pytest.raises(TypeError, match=f"flax_attention_fn: {name} is a str"):
            flax_attention_fn(q, q, q, **{name: "causal"})
    with pytest.raises(TypeError, match="flax_attention_fn: value is a NoneType"):
        flax_attention_fn(q, q, None)
    additive = jnp.where(jnp.tri(L, dtype=bool), 0.0, -jnp.inf)
    np.testing.assert_array_equal(flax_attention_fn(q, q, q, mask=additive), 0)
