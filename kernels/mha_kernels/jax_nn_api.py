"""`jax.nn.dot_product_attention` by this package: the same signature, so that it can be swapped in."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_kernels.algebra.masks import CausalMask, DenseMask, KeyPaddingMask, Mask, WindowMask
from mha_kernels.algebra.operands import known
from mha_kernels.api import attention_with_statistics
from mha_kernels.arguments import check_arrays


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: Any = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Any = None,
    return_residual: bool = False,
) -> Any:
    """softmax(scale q.k + bias) v with the arguments of `jax.nn.dot_product_attention`, run by this package.

    Args:
        query: (B, Q, H, E) or (Q, H, E). key, value: (B, K, G, E|V) or without B. bias, mask: rank 4 (or 3) arrays that
            broadcast to (B, H, Q, K). query_seq_lengths, key_value_seq_lengths: int32 (B,), real queries and keys.
            local_window_size: (left, right), or one number for both. implementation: None for "auto", or any name that
            `attention` takes.
        return_residual: also return log-sum-exp (B, Q, H), which here has a gradient.

    Two things differ: a query without any allowed key gives zeros (jax.nn gives the mean of all values), and float64 is
    computed in float64.

    Raises:
        ValueError, TypeError: as `attention`; also for lengths that are not (B,) integers and a window that is not
            one or two of them.
    """
    query, key, value = (known(array, name) for name, array in (("query", query), ("key", key), ("value", value)))
    single = query.ndim == 3
    query, key, value, bias, mask = (
        array[None] if array is not None and np.ndim(array) == 3 else array for array in (query, key, value, bias, mask)
    )
    check_arrays(query, key, value)
    masks: list[Mask] = [] if mask is None else [mask if isinstance(mask, Mask) else DenseMask(mask)]
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal is {is_causal!r}; expected a bool")
    if is_causal:
        masks.append(CausalMask())
    if local_window_size is not None:
        given = local_window_size
        window = tuple(given) if isinstance(given, tuple | list) else (given, given)
        if len(window) != 2 or not all(isinstance(side, int | np.integer) for side in window):
            raise TypeError(f"local_window_size is {local_window_size!r}; expected (left, right) or one integer")
        masks.append(WindowMask(*window))
    if key_value_seq_lengths is not None:
        masks.append(KeyPaddingMask(_before("key_value_seq_lengths", key_value_seq_lengths, *key.shape[:2])))
    if query_seq_lengths is not None:
        real = _before("query_seq_lengths", query_seq_lengths, *query.shape[:2])
        masks.append(DenseMask(real[:, None, :, None]))
    joined = None
    for part in masks:
        joined = part if joined is None else joined & part
    output, statistics = attention_with_statistics(
        query,
        key,
        value,
        mask=joined,
        bias=bias,
        scale=scale,
        implementation="auto" if implementation is None else implementation,
        statistics=("lse",) if return_residual else (),
    )
    output = output[0] if single else output
    if not return_residual:
        return output
    residual = statistics.lse.swapaxes(1, 2)  # type: ignore[union-attr]
    return output, residual[0] if single else residual


def _before(name: str, lengths: Any, batch: int, size: int) -> jax.Array:
    """(B, size): True before each example's length."""
    lengths = known(lengths, name)
    if lengths.shape != (batch,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(f"{name} has shape {lengths.shape} and dtype {lengths.dtype}; expected {(batch,)} integers")
    return jnp.arange(size)[None] < jnp.asarray(lengths)[:, None]
