"""The algebra with no framework: a dictionary of arrays and `mha_kernels`, which needs jax alone."""

import jax
import jax.numpy as jnp

from mha_kernels import AlibiBias, CausalMask, alibi_slopes, attention

D, H, E = 16, 4, 4
keys = jax.random.split(jax.random.key(0), 4)
parameters = {
    "query": jax.random.normal(keys[0], (D, H, E)) / 4,
    "key": jax.random.normal(keys[1], (D, 2, E)) / 4,  # two key/value heads for four query heads
    "value": jax.random.normal(keys[2], (D, 2, E)) / 4,
    "output": jax.random.normal(keys[3], (H, E, D)) / 4,
}


def self_attention(parameters, x):
    """x (B, L, D) -> (B, L, D)."""
    query, key, value = (jnp.einsum("bld,dhe->blhe", x, parameters[name]) for name in ("query", "key", "value"))
    heads = attention(query, key, value, mask=CausalMask(), bias=AlibiBias(alibi_slopes(H)))
    return jnp.einsum("blhe,hed->bld", heads, parameters["output"])


x = jax.random.normal(jax.random.key(1), (2, 5, D))
loss, gradients = jax.jit(jax.value_and_grad(lambda p: jnp.mean(self_attention(p, x) ** 2)))(parameters)
assert all(g.shape == p.shape for g, p in zip(jax.tree.leaves(gradients), jax.tree.leaves(parameters)))
print(f"loss {loss:.4f}")
