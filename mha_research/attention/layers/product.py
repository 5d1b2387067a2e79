"""Products of activations with kernels, in the form in which they are fast on CPUs."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax import lax


def product(inputs: jax.Array, kernel: jax.Array, precision: Any = None) -> jax.Array:
    """inputs (..., D) times kernel (D, ...): the last axis with the first."""
    return flat_dot_general(inputs, kernel, (((inputs.ndim - 1,), (0,)), ((), ())), precision)


def flat_dot_general(
    inputs: jax.Array,
    kernel: jax.Array,
    dimension_numbers: lax.DotDimensionNumbers,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> jax.Array:
    """`lax.dot_general` over the last axes of `inputs` and the first of `kernel`, as a product of two matrices.

    For the `dot_general` of nnx.Linear and nnx.LinearGeneral. The gradient of a kernel sums over batch and length. Over
    two axes XLA for CPUs first copies the cotangent into another order, and computes it once more inside that copy;
    over one axis, and with the cotangent held back from fusion, it does not, which takes a fifth off a training step.
    Raises ValueError for other axes.
    """
    (of_inputs, of_kernel), batch = dimension_numbers
    count, rank = len(of_kernel), inputs.ndim
    ends = tuple(of_inputs) == tuple(range(rank - count, rank)) and tuple(of_kernel) == tuple(range(count))
    if not ends or any(map(len, batch)) or out_sharding is not None:
        raise ValueError(f"flat_dot_general: last axes with first ones, no batch, no sharding; got {dimension_numbers}")
    width = math.prod(kernel.shape[:count])
    flat = lax.dot(
        inputs.reshape(-1, width),
        kernel.reshape(width, -1),
        precision=precision,
        preferred_element_type=preferred_element_type,
    )
    if jax.default_backend() == "cpu":  # elsewhere what follows a product is fused into it
        flat = lax.optimization_barrier(flat)
    return flat.reshape(*inputs.shape[: rank - count], *kernel.shape[count:])
