"""Initialisers of the projection matrices, all called as ``init(key, (in, out), dtype)`` on the flat matrix.

A projection to heads is stored as (D, H, E) but *is* the matrix (D, H*E): fans, orthogonality and spectra are those of
the flat matrix, which the modules hand over before they reshape. Any initialiser of `jax.nn.initializers` fits as well.

For an n x n matrix ||W||_F^2 is n under `xavier_uniform` (in expectation) and `orthogonal` (exactly); kappa is s_max /
s_min.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mha_research.attention.arguments import check_integers, check_numbers

Initializer = Callable[[jax.Array, tuple[int, int], Any], jax.Array]


def xavier_uniform() -> Initializer:
    """W_ij ~ U(-a, a), a = sqrt(6 / (in + out)): standard deviation sqrt(2 / (in + out)).

    The singular values of a square matrix fill [0, 2] (quarter circle law) and its kappa grows as n: the median is 3.67
    n for Gaussian entries (Edelman 1988), so a large kappa is no fault of a random matrix. Glorot & Bengio 2010,
    equation 16.
    """
    return jax.nn.initializers.xavier_uniform()


def orthogonal(scale: float = 1.0, num_heads: int | None = None, head_axis: int = 1) -> Initializer:
    """W = scale * Q with Q from the Haar measure: orthonormal rows or columns, whichever are fewer.

    Every singular value is `scale`, kappa is 1, the standard deviation of an entry scale / sqrt(max(in, out)). With
    `num_heads` every head's block is orthogonal by itself and independent of the others: columns are cut for query, key
    and value (``head_axis=1``), rows for the output projection (``head_axis=0``). Saxe et al. 2014.

    Args:
        scale: every singular value
        num_heads: blocks that are orthogonal by themselves; the whole matrix unless given
        head_axis: the axis that is cut

    Raises ValueError when the cut axis is no multiple of `num_heads`, and for numbers that make no sense.
    """
    check_integers("orthogonal", num_heads=num_heads)
    check_numbers("orthogonal", scale=scale)
    if head_axis not in (0, 1):
        raise ValueError(f"orthogonal: head_axis must be 0 or 1, got {head_axis!r}")
    whole = _haar(scale)
    if num_heads is None:
        return whole

    def init(key: jax.Array, shape: tuple[int, int], dtype: Any = jnp.float32) -> jax.Array:
        if shape[head_axis] % num_heads:
            raise ValueError(f"orthogonal: axis {head_axis} of {shape} is no multiple of num_heads={num_heads}")
        block = list(shape)
        block[head_axis] //= num_heads
        blocks = [whole(k, (block[0], block[1]), dtype) for k in jax.random.split(key, num_heads)]
        return jnp.concatenate(blocks, axis=head_axis)

    return init


def _haar(scale: float = 1.0) -> Initializer:
    """`jax.nn.initializers.orthogonal`, whose factorisation takes no 16-bit type, for every type."""
    whole = jax.nn.initializers.orthogonal(float(scale))

    def init(key: jax.Array, shape: tuple[int, int], dtype: Any = jnp.float32) -> jax.Array:
        return whole(key, shape, _wide(dtype)).astype(dtype)

    return init


def _wide(dtype: Any) -> Any:
    """The type in which a matrix of `dtype` is drawn and factorised: float32 at least, whatever JAX's default is."""
    return jnp.promote_types(dtype, jnp.float32)


def svd_decay(rate: float = 0.95, match_norm: bool = False) -> Initializer:
    """W = U diag(rate^0, rate^1, ...) V^T with Haar-distributed U and V.

    With n = min(in, out): kappa = rate^-(n-1) (675 at n = 128, 2.4e11 at n = 512 for 0.95) and ||W||_F^2 = (1 -
    rate^(2n)) / (1 - rate^2), 10.256 for 0.95 and n >= 128. That shrinks with respect to a usual initialiser, so scores
    start near zero and attention near uniform; `match_norm` rescales W to the Xavier norm, ||W||_F^2 = 2 in out / (in +
    out), so that the shape of the spectrum is compared and not its size. The proposal has no published source; it is
    here to be tested.

    Args:
        rate: ratio of successive singular values
        match_norm: scale to the Frobenius norm of xavier_uniform

    Raises ValueError unless 0 < rate <= 1.
    """
    check_numbers("svd_decay", rate=rate)
    if not 0 < rate <= 1:
        raise ValueError(f"svd_decay: rate must be in (0, 1], got {rate}")
    whole = _haar()

    def init(key: jax.Array, shape: tuple[int, int], dtype: Any = jnp.float32) -> jax.Array:
        rows, columns = shape
        rank = min(shape)
        left_key, right_key = jax.random.split(key)
        left = whole(left_key, (rows, rank), _wide(dtype))
        right = whole(right_key, (rank, columns), _wide(dtype))
        spectrum = float(rate) ** jnp.arange(rank, dtype=_wide(dtype))
        if match_norm:
            spectrum *= jnp.sqrt(2 * rows * columns / (rows + columns) / jnp.sum(spectrum**2))
        return (jnp.einsum("ir,r,ro->io", left, spectrum, right)).astype(dtype)

    return init


def scaled(initializer: Initializer, factor: float) -> Initializer:
    """factor * W: every singular value and the standard deviation times `factor`, kappa unchanged.

    For example 1 / sqrt(2 N) on the output projections of N blocks (GPT-2). Raises ValueError for a factor that is not
    finite.
    """
    check_numbers("scaled", factor=factor)

    def init(key: jax.Array, shape: tuple[int, int], dtype: Any = jnp.float32) -> jax.Array:
        return (factor * initializer(key, shape, dtype)).astype(dtype)

    return init


def identity() -> Initializer:
    """W_ij = 1 if i = j else 0: singular values 1 (min(in, out) of them), kappa 1. Draws nothing from the key."""

    def init(key: jax.Array, shape: tuple[int, int], dtype: Any = jnp.float32) -> jax.Array:
        return jnp.eye(*shape, dtype=dtype)

    return init


JointInitializer = Callable[..., dict[str, jax.Array]]


def mimetic(
    qk_noise: float = 0.4, qk_identity: float = 0.4, vo_noise: float = 0.7, vo_identity: float = 0.7
) -> JointInitializer:
    """W_Q W_K^T ~ qk_noise Z + qk_identity I for every head, W_V W_O ~ vo_noise Z - vo_identity I, with Z_ij ~ N(0,
    1/D).

    The four matrices depend on each other, so this is the `joint_init` of a module and not one matrix's initialiser:
    called ``(key, features, num_heads, head_dim, value_head_dim, dtype)`` it gives the flat matrices ``query`` (D,
    H*E), ``key`` (D, H*E), ``value`` (D, H*V) and ``output`` (H*V, D). The products are the truncated singular value
    decompositions of rank E (each head) and H*V (all heads together), so with H*V = D the second is exact. Trockman &
    Kolter 2023, "Mimetic initialization of self-attention layers".

    Raises ValueError when E or H*V exceeds D.
    """

    def factors(
        key: jax.Array, features: int, rank: int, noise: float, diagonal: float, dtype: Any
    ) -> tuple[jax.Array, jax.Array]:
        normal = jax.random.normal(key, (features, features), dtype) / math.sqrt(features)
        left, spectrum, right = jnp.linalg.svd(noise * normal + diagonal * jnp.eye(features, dtype=dtype))
        root = jnp.sqrt(spectrum[:rank])
        return left[:, :rank] * root[None], root[:, None] * right[:rank]

    def init(
        key: jax.Array, features: int, num_heads: int, head_dim: int, value_head_dim: int, dtype: Any = jnp.float32
    ) -> dict[str, jax.Array]:
        value_width = num_heads * value_head_dim
        if head_dim > features or value_width > features:
            raise ValueError(
                f"mimetic: head_dim={head_dim} and num_heads * value_head_dim={value_width} may not exceed "
                f"features={features}"
            )
        *head_keys, value_key = jax.random.split(key, num_heads + 1)
        pairs = [factors(k, features, head_dim, qk_noise, qk_identity, _wide(dtype)) for k in head_keys]
        value, output = factors(value_key, features, value_width, vo_noise, -vo_identity, _wide(dtype))
        matrices = {
            "query": jnp.concatenate([left for left, _ in pairs], axis=1),
            "key": jnp.concatenate([right.T for _, right in pairs], axis=1),
            "value": value,
            "output": output,
        }
        return {name: matrix.astype(dtype) for name, matrix in matrices.items()}

    return init
