"""`MultiHeadAttention` inside an nnx model, used functionally: split once, a plain tree under jax.jit; then
decoding."""

import jax
import jax.numpy as jnp
from flax import nnx

from mha_kernels import CausalMask
from mha_research import DropHead, MultiHeadAttention, Rotary


class Block(nnx.Module):
    """A pre-norm block."""

    def __init__(self, features, num_heads, rngs):
        self.norm = nnx.LayerNorm(features, rngs=rngs)
        self.attention = MultiHeadAttention(
            features, num_heads, num_kv_heads=2, position=Rotary(), drop_head=DropHead(0.2), rngs=rngs
        )

    def __call__(self, x, **call):
        return x + self.attention(self.norm(x), mask=CausalMask(), **call)


x = jax.random.normal(jax.random.key(0), (2, 5, 16))
graphdef, parameters = nnx.split(Block(16, 4, nnx.Rngs(0)))


@jax.jit
def step(parameters, key):
    def loss(parameters):
        return jnp.mean(nnx.merge(graphdef, parameters)(x, deterministic=False, rngs=key) ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, parameters, jax.grad(loss)(parameters))


@jax.jit
def decode(parameters, token, cache):
    block = nnx.merge(graphdef, parameters)
    output, cache = block.attention.decode(block.norm(token), cache)
    return token + output, cache


parameters = step(parameters, jax.random.key(1))
cache, outputs = nnx.merge(graphdef, parameters).attention.init_cache(batch_size=2, capacity=5), []
for t in range(5):
    output, cache = decode(parameters, x[:, t : t + 1], cache)
    outputs.append(output)
at_once = jax.jit(lambda parameters: nnx.merge(graphdef, parameters)(x))(parameters)
assert jnp.allclose(jnp.concatenate(outputs, axis=1), at_once, atol=1e-5)
print("decoded token by token, the same as at once")
