"""The two implementations that `jax.nn.dot_product_attention` brings, for what they do the same as the algebra.

They share nothing with the tile functions: useful beside them as a peer in benchmarks, and cuDNN for its speed.
"""

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_kernels.algebra.masks import CausalMask, WindowMask
from mha_kernels.algebra.spec import AttentionSpec, HeadStatistics, whole


@dataclasses.dataclass(frozen=True)
class JaxNN:
    """`jax.nn.dot_product_attention` with its implementation "xla" (dense, O(Q K) memory) or "cudnn"."""

    name: str

    def unsupported_reason(
        self, query: jax.Array, key: jax.Array, value: jax.Array, algebra: AttentionSpec, statistics: tuple[str, ...]
    ) -> str | None:
        """Why jax.nn cannot do the job as the algebra defines it; None where it can."""
        for absent, what in (
            (algebra.softcap, "softcap"),
            (algebra.sink, "sink"),
            (algebra.head_gate, "head gate: a closed head would still run"),
            (algebra.dropout, "dropout by position"),
        ):
            if absent is not None:
                return f"jax.nn has no {what}"
        if statistics:
            return f"jax.nn computes none of the statistics {', '.join(statistics)}"
        if query.dtype == jnp.float64:
            return "jax.nn computes the softmax of float64 in float32"
        if query.dtype == jnp.float16 and jax.default_backend() == "cpu":
            return "XLA sums no products of float16 in float32 on a CPU"
        if query.dtype == jnp.bfloat16 and 1 in (query.shape[1], key.shape[1]) and jax.default_backend() == "cpu":
            return "XLA sums no products of a single bfloat16 row in float32 on a CPU, before JAX 0.11"
        if value.shape[-1] != query.shape[-1]:
            return f"jax.nn needs values as wide as keys; they are {value.shape[-1]} and {query.shape[-1]}"
        reason = _mask_unsupported_reason(query, key, algebra)
        if reason is None and algebra.bias is not None and algebra.bias.forbids:
            reason = "a bias of -inf may leave a query without keys, where jax.nn gives NaN"
        return reason or (self._cudnn_unsupported_reason(query, algebra) if self.name == "cudnn" else None)

    @staticmethod
    def _cudnn_unsupported_reason(query: jax.Array, algebra: AttentionSpec) -> str | None:
        if jax.default_backend() != "gpu":
            return f"cuDNN needs an NVIDIA GPU; the default backend is {jax.default_backend()}"
        if query.dtype not in (jnp.float16, jnp.bfloat16):
            return f"cuDNN multiplies float16 and bfloat16; query is {query.dtype}"
        if query.shape[-1] % 8 or query.shape[-1] > 128:
            return f"cuDNN needs a head width of a multiple of 8, at most 128; it is {query.shape[-1]}"
        if isinstance(algebra.mask, WindowMask):
            return "cuDNN has no window on both sides"
        if algebra.bias is not None:
            return "cuDNN gives the gradient of a bias for one example at most"
        return None

    def attend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        algebra: AttentionSpec,
        statistics: tuple[str, ...],
        precision: Any,
    ) -> tuple[jax.Array, HeadStatistics]:
        """Output (B, Q, H, V) and no statistics."""
        (_, length_q, _, _), (_, length_k, _, _) = query.shape, key.shape
        bias = None if algebra.bias is None else algebra.bias.tile(whole(algebra, length_q, length_k))
        window = None
        if isinstance(algebra.mask, WindowMask):
            sides = (algebra.mask.left, length_q), (algebra.mask.right, length_k)
            window = tuple(longest if side is None else int(side.item()) for side, longest in sides)
        with contextlib.nullcontext() if precision is None else jax.default_matmul_precision(precision):
            output = jax.nn.dot_product_attention(  # type: ignore[call-overload]
                query,
                key,
                value,
                bias=None if bias is None else jnp.broadcast_to(bias, (*bias.shape[:2], length_q, length_k)),
                scale=float(algebra.scale.item()),
                is_causal=isinstance(algebra.mask, CausalMask),
                local_window_size=window,
                implementation=self.name,
            )
        return output, HeadStatistics()


def _mask_unsupported_reason(query: jax.Array, key: jax.Array, algebra: AttentionSpec) -> str | None:
    """jax.nn attends evenly where a query has no key: only masks that cannot leave one are its own."""
    known: tuple[Any, ...] = (*algebra.positions[2:], algebra.scale)
    mask = algebra.mask
    if isinstance(mask, CausalMask | WindowMask):
        known += tuple(leaf for leaf in jax.tree.leaves(mask))
    if not all(isinstance(leaf, np.ndarray) for leaf in known):
        return "jax.nn needs scale, origin, offset and window as Python numbers"
    shift = int((algebra.positions.key - algebra.positions.query).item())
    if mask is None:
        return None
    if isinstance(mask, CausalMask):
        return None if mask.offset.item() == shift else "jax.nn has the causal mask with offset 0 alone"
    if isinstance(mask, WindowMask):
        left = query.shape[1] if mask.left is None else int(mask.left.item())
        right = key.shape[1] if mask.right is None else int(mask.right.item())
        empty = left < 0 or right < 0 or query.shape[1] - 1 - left > key.shape[1] - 1
        return (
            "a query of this window may have no key, where jax.nn gives the mean of all values"
            if empty or shift
            else None
        )
    return f"{type(mask).__name__} may leave a query without keys, where jax.nn gives the mean of all values"
