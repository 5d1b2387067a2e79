"""The algebra inside an Equinox module. Equinox modules take one example; `jax.vmap` adds the batch."""

import equinox as eqx
import jax
import jax.numpy as jnp

from mha_kernels import CausalMask, attention


class CausalAttention(eqx.Module):
    """x (L, D) -> (L, D)."""

    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    output: eqx.nn.Linear
    num_heads: int = eqx.field(static=True)

    def __init__(self, features, num_heads, *, key):
        keys = jax.random.split(key, 4)
        self.query, self.key, self.value, self.output = (eqx.nn.Linear(features, features, key=k) for k in keys)
        self.num_heads = num_heads

    def __call__(self, x):
        heads = [jax.vmap(p)(x).reshape(1, len(x), self.num_heads, -1) for p in (self.query, self.key, self.value)]
        return jax.vmap(self.output)(attention(*heads, mask=CausalMask()).reshape(len(x), -1))


module = CausalAttention(16, 4, key=jax.random.key(0))
x = jax.random.normal(jax.random.key(1), (2, 5, 16))


@eqx.filter_jit
@eqx.filter_value_and_grad
def loss(module, x):
    return jnp.mean(jax.vmap(module)(x) ** 2)


value, gradients = loss(module, x)
assert jnp.isfinite(gradients.query.weight).all()
print(f"loss {value:.4f}")
