"""Flax's own attention modules with the kernels of this project: one argument changes."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from mha_research import flax_attention_fn

x = jax.random.normal(jax.random.key(0), (2, 5, 16))

# nnx: everything else, parameters included, stays Flax's.
theirs = nnx.MultiHeadAttention(4, 16, decode=False, rngs=nnx.Rngs(0))
ours = nnx.MultiHeadAttention(4, 16, decode=False, rngs=nnx.Rngs(0), attention_fn=flax_attention_fn)
assert jnp.allclose(ours(x, is_causal=True), theirs(x, is_causal=True), atol=1e-5)

# linen: masks and dropout pass through as well.
mask = nn.make_causal_mask(jnp.ones((2, 5)))
layer = nn.MultiHeadDotProductAttention(4, dropout_rate=0.1, attention_fn=flax_attention_fn)
variables = layer.init(jax.random.key(1), x, deterministic=True)
output = layer.apply(variables, x, mask=mask, deterministic=False, rngs={"dropout": jax.random.key(2)})
assert output.shape == x.shape
print("nnx and linen run on the kernels")
