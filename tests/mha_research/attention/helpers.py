"""What the module tests share: seeded inputs, modules whose parameters are all moved, and one compiled call.

All in JAX's default type: float32, and float64 with bounds ten million times as tight under the fixtures `x64` and
`each_precision`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mha_research import MultiHeadAttention


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), float)


def build(*args, kind=MultiHeadAttention, seed=0, **choices):
    """A module on the reference with every parameter moved from its start, so that biases and tables are not zero."""
    defaults = {"implementation": "reference", "param_dtype": jnp.result_type(float), "rngs": nnx.Rngs(seed)}
    module = kind(*args, **{**defaults, **choices})
    graph, parameters, rest = nnx.split(module, nnx.Param, ...)
    parameters = jax.tree.map(lambda x: x + 0.3 * normal(x.size, *x.shape), parameters)
    return nnx.merge(graph, parameters, rest)


def run(m, *inputs, **options):
    """One compiled call: op by op these tests would compile every primitive for every shape."""
    return jax.jit(lambda *x: m(*x, **options))(*inputs)


def close(actual, expected, bound=3e-6):
    bound = 1e-7 * bound if jax.config.jax_enable_x64 else bound
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=0, atol=bound)


def double(parameter):
    """The value of a parameter in float64."""
    return np.asarray(parameter[...], np.float64)
