"""`MultiHeadAttention` inside a linen model through `nnx.bridge.ToLinen`, trained for a step with dropout."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.nnx import bridge

from mha_kernels import CausalMask
from mha_research import Alibi, MultiHeadAttention


class Block(nn.Module):
    """A pre-norm block whose attention comes from this project."""

    features: int
    num_heads: int

    @nn.compact
    def __call__(self, x, deterministic=True):
        attention = bridge.ToLinen(
            MultiHeadAttention, args=(self.features, self.num_heads), kwargs={"position": Alibi(), "dropout_rate": 0.1}
        )
        # The module takes a key of its own, which linen makes; nothing random is stored in it.
        key = None if deterministic else self.make_rng("dropout")
        x = x + attention(nn.LayerNorm()(x), mask=CausalMask(), deterministic=deterministic, rngs=key)
        return x + nn.Dense(self.features)(nn.LayerNorm()(x))


x = jax.random.normal(jax.random.key(0), (2, 5, 16))
block = Block(16, 4)
variables = block.init(jax.random.key(1), x)


@jax.jit
def loss(parameters, key):
    return jnp.mean(block.apply({"params": parameters}, x, deterministic=False, rngs={"dropout": key}) ** 2)


gradients = jax.grad(loss)(variables["params"], jax.random.key(2))
assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(gradients))
print("linen parameters:", sum(p.size for p in jax.tree.leaves(variables["params"])))
