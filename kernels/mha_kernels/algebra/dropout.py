"""Dropout of attention probabilities, decided by a hash of position.

Whether the probability at (b, h, i, j) is dropped depends on the key and on those four numbers alone, so every
implementation, every tile size and every shard drops the same entries, forward and backward, and nothing is stored.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_kernels.algebra.operands import Operand, Tile, axes


class Dropout(Operand):
    """Drops each probability with probability `rate` and divides the kept ones by 1 - rate, after normalisation.

    Args:
        rate: float in [0, 1].
        key: a JAX random key, typed or raw uint32.

    Raises:
        ValueError: rate is outside [0, 1] or not a number.
        TypeError: key is not a random key.
    """

    rate: float
    key: Any = axes("S", "int")

    def __post_init__(self) -> None:
        number = isinstance(self.rate, (int, float, np.floating)) and not isinstance(self.rate, bool)
        if not number or not 0.0 <= self.rate <= 1.0:
            raise ValueError(f"dropout rate is {self.rate!r}; expected a number in [0, 1]")
        object.__setattr__(self, "rate", float(self.rate))

    def keep(self, at: Tile) -> jax.Array:
        """Boolean tile: True where the probability is kept."""
        if self.rate == 1.0:
            return jnp.asarray(False)
        seed = (self.key[..., 0], self.key[..., 1])
        row = _mix(_mix(_mix(seed[0] ^ _unsigned(at.batch)) ^ _unsigned(at.head)) ^ _unsigned(at.query))
        column = _mix(seed[1] ^ _unsigned(at.key))
        return _mix(row + column) >= jnp.uint32(min(math.ceil(self.rate * 2**32), 2**32 - 1))

    def scale(self) -> float:
        """What a kept probability is multiplied by."""
        return 0.0 if self.rate == 1.0 else 1.0 / (1.0 - self.rate)


def seed_of(key: Any) -> jax.Array:
    """Two uint32 words drawn from a random key of any implementation."""
    try:
        return jax.random.bits(key, (2,), jnp.uint32)
    except (TypeError, ValueError) as error:
        raise TypeError(f"dropout key is {key!r}; expected one JAX random key, e.g. jax.random.key(0)") from error


def _unsigned(position: Any) -> jax.Array:
    return jnp.asarray(position).astype(jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of uint32 in which every input bit flips every output bit with probability close to 1/2.

    Two rounds of xor-shift and multiply, with the constants that C. Wellons' hash-prospector found to have the least
    bias.
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
