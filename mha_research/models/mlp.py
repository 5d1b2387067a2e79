"""The position-wise half of a block, and the norm before or after it."""

import jax
import jax.numpy as jnp
from flax import nnx

from mha_research.attention.layers.product import flat_dot_general

ACTIVATIONS = {"gelu": nnx.gelu, "relu": nnx.relu, "swiglu": nnx.silu}
NORMS = {"rms_norm": nnx.RMSNorm, "layer_norm": nnx.LayerNorm}


class Mlp(nnx.Module):
    """y = W_2 f(W_1 x), or W_2 (silu(W_1 x) * W_3 x) for swiglu (Shazeer 2020, arXiv:2002.05202).

    x and y are (..., D); W_1 and W_3 (D, width), W_2 (width, D). Computes in `dtype`, parameters are float32.
    """

    def __init__(
        self,
        d_model: int,
        width: int,
        activation: str = "gelu",
        use_bias: bool = False,
        dtype: jnp.dtype | None = None,
        *,
        rngs: nnx.Rngs,
    ) -> None:
        def linear(inputs: int, outputs: int) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, use_bias=use_bias, dtype=dtype, dot_general=flat_dot_general, rngs=rngs)

        self.hidden, self.output = linear(d_model, width), linear(width, d_model)
        self.gate = linear(d_model, width) if activation == "swiglu" else None
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = ACTIVATIONS[self.activation](self.hidden(x))
        return self.output(hidden if self.gate is None else hidden * self.gate(x))


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """x with entries zeroed with probability `rate` and the others over 1 - rate; x itself without a key or a rate."""
    if key is None or rate == 0:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), jnp.zeros_like(x))
