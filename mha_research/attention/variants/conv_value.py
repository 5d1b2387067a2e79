"""Values made by a convolution."""

from __future__ import annotations

from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import nnx

from mha_kernels import Mask
from mha_research.attention.kind import NO_SEGMENTS, ORDERED, AllowedValues
from mha_research.attention.arguments import as_grid, as_padding, check_integers
from mha_research.attention.cache import DecodeCache
from mha_research.attention.multi_head import MultiHeadAttention


class ConvProjection(nnx.Module):
    """x (B, K, D) to heads (B, K, G, V) by a convolution over the sequence, or over the grid that it unrolls row by
    row.
    """

    def __init__(
        self, features: int, heads: int, width: int, *, grid: tuple[int, int] | None, causal: bool, **conv: Any
    ):
        self.grid, self.shape = grid, (heads, width)
        window = (conv.pop("kernel_size"),) * (1 if grid is None else 2)
        padding = "CAUSAL" if causal else "SAME"
        self.conv = nnx.Conv(features, heads * width, window, padding=padding, **conv)

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, width = x.shape
        if self.grid is not None:
            if length != self.grid[0] * self.grid[1]:
                raise ValueError(f"ConvValueAttention: {length} values do not fill the grid {self.grid}")
            x = x.reshape(batch, *self.grid, width)
        return self.conv(x).reshape(batch, length, *self.shape)


class ConvValueAttention(MultiHeadAttention):
    """head = softmax(scale Q K^T) conv(X): query and key from single tokens, values from their neighbourhood.

    The idea of convolutional token projections (CvT, Wu et al. 2021) for the values alone. With `grid` (rows, columns)
    the keys are patches, row by row, and the convolution is `kernel_size` x `kernel_size`; without, it runs along the
    sequence, over earlier tokens only if `causal` (a causal mask alone would leak later tokens through it). Padded
    tokens count as zero. The value projection has kernel_size^n D G V weights in place of D G V. Cannot `decode`, since
    the cache does not keep the inputs.

    Args:
        kernel_size: tokens up to its own that make a value
        grid: (rows, columns) of patches
        causal: earlier tokens only
    """

    allowed = (
        ORDERED,
        NO_SEGMENTS,
        AllowedValues("model.attention.value_init.name", ("xavier_uniform",), "its values are a convolution"),
    )

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *sizes: Any,
        kernel_size: Annotated[int, "[1, inf)"] = 3,
        grid: tuple[int, int] | None = None,
        causal: bool = False,
        rngs: nnx.Rngs,
        **choices: Any,
    ):
        if choices.get("packed") or choices.get("joint_init"):
            raise ValueError("ConvValueAttention takes no packed and no joint_init")
        check_integers("ConvValueAttention", kernel_size=kernel_size)
        grid = as_grid("ConvValueAttention", grid)
        if causal and grid is not None:
            raise ValueError(f"ConvValueAttention: causal needs a sequence, not a grid, got {grid}")
        super().__init__(in_features, num_heads, *sizes, rngs=rngs, **choices)
        self.value = ConvProjection(
            self.value_features, self.num_kv_heads, self.value_head_dim, grid=grid, causal=causal,
            kernel_size=kernel_size, kernel_init=jax.nn.initializers.xavier_uniform(), use_bias=self.query.use_bias,
            dtype=self.dtype, param_dtype=self.param_dtype, precision=self.precision, rngs=rngs,
        )  # fmt: skip

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array | None = None,
        value: jax.Array | None = None,
        *,
        mask: Mask | jax.Array | None = None,
        key_padding_mask: jax.Array | None = None,
        **call: Any,
    ) -> Any:
        """As `MultiHeadAttention`; what `key_padding_mask` marks as padding does not reach the convolution either."""
        query, key, value = self._check_inputs(query, key, value)
        if key_padding_mask is not None:
            value = jnp.where(as_padding(key_padding_mask, *value.shape[:2])[..., None], value, 0)
        return super().__call__(query, key, value, mask=mask, key_padding_mask=key_padding_mask, **call)

    def decode(self, *arguments: Any, **options: Any) -> tuple[jax.Array, DecodeCache]:
        raise ValueError("ConvValueAttention cannot decode: its values need the inputs around a token")

    def kernels(self) -> dict[str, jax.Array]:
        raise ValueError("ConvValueAttention has no value matrix of its heads: its values are a convolution")
