"""Decoding: cached equals full, padding is remembered, garbage is never read, a full cache is never silent."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mha_research.attention
from mha_kernels import CausalMask, WindowMask
from mha_research import Alibi, DomainAdapter, MultiHeadAttention, RelativeBias, Rotary
from tests.mha_research.attention.helpers import build, close, normal, run

B, L, D = 2, 7, 16
SCHEMES = [
    None,
    Alibi(),
    Rotary(),
    RelativeBias(num_buckets=8, max_distance=5),
    RelativeBias("clipped", max_distance=2),
]


def decode_in_parts(m, x, cuts, keep=None, capacity=L, **options):
    """Outputs of the parts of x (B, L, D) one after the other, and the cache at the end."""
    cache, outputs = m.init_cache(x.shape[0], capacity), []
    for start, stop in zip((0, *cuts), (*cuts, x.shape[1])):
        part = None if keep is None else keep[:, start:stop]
        output, cache = jax.jit(lambda x, c, part: m.decode(x, c, part, **options))(x[:, start:stop], cache, part)
        outputs.append(output)
    return jnp.concatenate(outputs, 1), cache


@pytest.mark.parametrize("position", SCHEMES, ids=str)
def test_cached_equals_full_with_padding_of_each_example(position):
    m = build(D, 4, 2, position=position)
    x = normal(1, B, L, D)
    keep = jnp.arange(L)[None] >= jnp.array([[0], [3]])
    full = run(m, x, mask=CausalMask(), key_padding_mask=keep)
    cached, cache = decode_in_parts(m, x, (3, 4), keep, capacity=11)
    assert cache.key.shape == (B, 11, 2, 4)
    close(cached, full, 1e-5)


def test_a_window_sees_positions_of_the_cache():
    m = build(D, 4, 2, position=Rotary())
    x = normal(1, B, L, D)
    full = run(m, x, mask=WindowMask(2, 0))
    close(decode_in_parts(m, x, (2, 5), mask=WindowMask(2, 0))[0], full, 1e-5)


def test_what_lies_beyond_the_index_never_matters():
    m = build(D, 4, 2, position=Alibi())
    x = normal(1, B, L, D)
    decode = jax.jit(m.decode)
    _, cache = decode(x[:, :3], m.init_cache(B, L))
    clean, _ = decode(x[:, 3:5], cache)
    beyond = (jnp.arange(L) >= 3)[None, :, None, None]
    for garbage in (jnp.nan, jnp.inf, 1e30):
        dirty = dataclasses.replace(
            cache,
            key=jnp.where(beyond, garbage, cache.key),
            value=jnp.where(beyond, garbage, cache.value),
            keep=cache.keep | beyond[..., 0, 0],
        )
        np.testing.assert_array_equal(decode(x[:, 3:5], dirty)[0], clean)


def test_a_full_cache_raises_and_is_nan_under_jit():
    m = build(D, 4)
    x = normal(1, B, L, D)
    _, cache = m.decode(x[:, :6], m.init_cache(B, 6))
    with pytest.raises(ValueError, match="full: 6 of 6 slots are taken, 1 more"):
        m.decode(x[:, 6:], cache)
    with pytest.raises(ValueError, match="7 tokens do not fit into a cache of capacity 6"):
        jax.jit(m.decode)(x, m.init_cache(B, 6))
    step = jax.jit(m.decode)
    for _ in range(2):
        output, cache = step(x[:, 6:], cache)
        assert np.isnan(output).all()


@pytest.mark.parametrize(
    "tokens, padding, words",
    [
        (np.zeros((3, 1, D)), None, "batch size 3, the cache was made for 2"),
        (np.zeros((B, 1, 5)), None, "query must be"),
        (np.zeros((B, 1, D)), np.ones((B, 2), bool), "key_padding_mask must be boolean"),
        (np.zeros((B, 1, D)), np.ones((B, 1)), "key_padding_mask must be boolean"),
    ],
)
def test_decode_refuses(tokens, padding, words):
    m = MultiHeadAttention(D, 4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=words):
        m.decode(jnp.asarray(tokens, jnp.float32), m.init_cache(B, 6), padding)
    with pytest.raises(ValueError, match="capacity must be at least 1, got 0"):
        m.init_cache(B, 0)


def test_many_single_tokens_compile_once_and_scan_alike():
    m = build(D, 4, 2, position=Alibi())
    x = normal(1, B, 256, D)
    step = jax.jit(m.decode, donate_argnums=1)
    cache, outputs = m.init_cache(B, 256), []
    for t in range(256):
        output, cache = step(x[:, t : t + 1], cache)
        outputs.append(output)
    assert step._cache_size() == 1
    close(jnp.concatenate(outputs, 1), run(m, x, mask=CausalMask()), 1e-5)
    scan = jax.jit(lambda cache, x: jax.lax.scan(lambda c, t: m.decode(t[:, None], c)[::-1], cache, x.swapaxes(0, 1)))
    last, scanned = scan(m.init_cache(B, 256), x)
    close(scanned[:, :, 0].swapaxes(0, 1), jnp.concatenate(outputs, 1), 1e-6)
    np.testing.assert_array_equal(last.index, cache.index)


def test_vmap_of_caches_that_hold_different_numbers_of_tokens():
    m = build(D, 4, 2, position=Rotary())
    x, starts, decode = normal(1, B, L, D), (2, 5), jax.jit(m.decode)
    caches = [decode(x[b : b + 1, :start], m.init_cache(1, L))[1] for b, start in enumerate(starts)]
    tokens = jnp.stack([x[b : b + 1, start : start + 2] for b, start in enumerate(starts)])
    together, _ = jax.jit(jax.vmap(m.decode))(tokens, jax.tree.map(lambda *leaves: jnp.stack(leaves), *caches))
    close(together, jnp.stack([decode(t, c)[0] for t, c in zip(tokens, caches)]), 1e-6)


VARIANTS = sorted({n for n in mha_research.attention.__all__ if n.endswith("Attention")} | {"DomainAdapter"})
CANNOT = {"ConvValueAttention", "FrameDifferenceAttention", "MultiScaleAttention"}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_decodes_what_the_full_pass_gives_or_refuses(name):
    kind, x = getattr(mha_research, name), normal(1, B, L, D)
    m = build(D, 2, kind=kind, **({"num_domains": 3} if kind is DomainAdapter else {}))
    options = {"domain": jnp.array([2, 0])} if kind is DomainAdapter else {}
    if name in CANNOT:
        with pytest.raises(ValueError, match=f"{name} cannot decode"):
            decode_in_parts(m, x, (3,))
        return
    close(decode_in_parts(m, x, (3,), **options)[0], run(m, x, mask=CausalMask(), **options), 1e-5)
