"""The keys and values of tokens already seen, for decoding."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from mha_research.attention.arguments import as_array, check_integers


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeCache:
    """A pytree of arrays: key (B, C, G, E) and value (B, C, G, V) with room for C tokens, keep (B, C) (True = real),
    index () the next slot.

    What lies at slots from `index` on is never read. Keys are stored with their rotation.
    """

    key: jax.Array
    value: jax.Array
    keep: jax.Array
    index: jax.Array

    @property
    def capacity(self) -> int:
        return self.key.shape[1]

    def append(self, key: jax.Array, value: jax.Array, keep: jax.Array | None) -> DecodeCache:
        """The cache with T more tokens. Raises ValueError when they do not fit and the index is concrete.

        Under jit the index still advances past the capacity, which `overflowed` reports from then on.
        """
        batch_size, length = key.shape[:2]
        for name, new, slots in (("key", key, self.key), ("value", value, self.value)):
            if new.shape[2:] != slots.shape[2:]:
                raise ValueError(
                    f"decode: the cache holds {name} heads {slots.shape[2:]} (G, width), the module makes "
                    f"{new.shape[2:]}: it was made for another module"
                )
        if batch_size != self.key.shape[0]:
            raise ValueError(f"decode: tokens have batch size {batch_size}, the cache was made for {self.key.shape[0]}")
        keep = jnp.ones((batch_size, length), bool) if keep is None else as_array("decode: key_padding_mask", keep)
        if keep.shape != (batch_size, length) or keep.dtype != bool:
            raise ValueError(
                f"decode: key_padding_mask must be boolean {(batch_size, length)}, got {keep.dtype} {keep.shape}"
            )
        if length > self.capacity:
            raise ValueError(f"decode: {length} tokens do not fit into a cache of capacity {self.capacity}")
        if not isinstance(self.index, jax.core.Tracer) and int(self.index) + length > self.capacity:
            raise ValueError(
                f"decode: the cache is full: {int(self.index)} of {self.capacity} slots are taken, "
                f"{length} more tokens came"
            )

        def write(slots: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(slots, new.astype(slots.dtype), self.index, axis=1)

        return DecodeCache(write(self.key, key), write(self.value, value), write(self.keep, keep), self.index + length)

    @property
    def overflowed(self) -> jax.Array:
        """(), bool: more tokens came than there are slots, so nothing computed from this cache means anything."""
        return self.index > self.capacity


def init_cache(
    batch_size: int, capacity: int, key_shape: tuple[int, int], value_shape: tuple[int, int], dtype: Any
) -> DecodeCache:
    """An empty cache. Raises ValueError unless batch size and capacity are at least 1, TypeError for a type that is not
    floating."""
    check_integers("init_cache", batch_size=batch_size, capacity=capacity)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"init_cache: dtype must be floating, got {dtype!r}")
    return DecodeCache(
        key=jnp.zeros((batch_size, capacity, *key_shape), dtype),
        value=jnp.zeros((batch_size, capacity, *value_shape), dtype),
        keep=jnp.zeros((batch_size, capacity), bool),
        index=jnp.zeros((), jnp.int32),
    )
