"""Groups of heads that look at patches of different sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mha_kernels import CausalMask, Mask, Tile
from mha_research.attention.kind import NO_SEGMENT_MASK, ORDERED, POSITION, AllowedValues
from mha_research.attention.arguments import as_gate, as_grid, as_padding, check_inputs, check_integers
from mha_research.attention.cache import DecodeCache
from mha_research.attention.multi_head import MultiHeadAttention

NO_DECODING = "MultiScaleAttention cannot decode: a patch is known only when its last token is"


class PatchCausalMask(Mask):
    """Patch j of `size` tokens is allowed for query i when its last token is not after i: size (j + 1) <= i + 1."""

    size: int

    def allowed(self, at: Tile) -> jax.Array:
        return self.size * (at.key + 1) <= at.query + 1


def pool_patches(
    x: jax.Array, size: int, keep: jax.Array | None, grid: tuple[int, int] | None
) -> tuple[jax.Array, jax.Array]:
    """Means over the real tokens of patches of `size` tokens, or size x size on a grid: (B, patches, D) and which hold
    any.

    x (B, L, D), keep (B, L) True = real; the last patches of a side may be cut short. Sums are at least float32, means
    of the type of x.
    """
    x = jnp.asarray(x)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    keep = jnp.ones(x.shape[:2], bool) if keep is None else keep
    sides = (x.shape[1],) if grid is None else grid
    counts = [math.ceil(side / size) for side in sides]
    spread = [(0, count * size - side) for side, count in zip(sides, counts)]
    split = [n for count in counts for n in (count, size)]
    inside = tuple(range(2, 2 + 2 * len(sides), 2))

    def patches(array: jax.Array) -> jax.Array:
        """(B, counts..., rest) sums over the tokens of every patch."""
        rest = array.shape[2:]
        array = array.reshape(array.shape[0], *sides, *rest)
        array = jnp.pad(array, [(0, 0), *spread, *((0, 0) for _ in rest)])
        array = array.reshape(array.shape[0], *split, *rest)
        return jnp.sum(array, axis=inside).reshape(array.shape[0], math.prod(counts), *rest)

    number = patches(keep.astype(wide))
    total = patches(jnp.where(keep[..., None], x, 0).astype(wide))
    means = total / jnp.maximum(number, 1)[..., None]
    return means.astype(x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else wide), number > 0


class MultiScaleAttention(nnx.Module):
    """output = sum_l g_l * attention_l(x, pool_(s_l)(y)), g = softmax(x W_g): a group of heads for every patch size
    s_l.

    Queries keep their resolution; keys and values of level l are means over patches of s_l tokens (s_l x s_l with
    `grid`), so a level costs 1 / s_l (1 / s_l^2) of the attention of a plain module with its heads. The gate is per
    token and level, equal at the start. Multi-scale vision transformers (Fan et al. 2021) pool keys and values in this
    way.

    Args:
      in_features: D. num_heads: heads of every level, or one number a level.
      patch_sizes: tokens s_l of a patch, for each group of num_heads heads
      head_dim, dropout_rate: of every level, or one a level.
      grid: (rows, columns) of the tokens, row by row. Other choices go to the levels' `MultiHeadAttention`.

    Masks are None and `CausalMask()` (a patch is seen when it has ended; not with `grid`), beside `key_padding_mask`.
    Raises ValueError for others, for biases and where lists have other lengths. Cannot decode.
    """

    hands_on_to = MultiHeadAttention
    allowed = (
        ORDERED,
        NO_SEGMENT_MASK,
        AllowedValues(POSITION, ("none",), "a patch has no one position; see model.position.name"),
        AllowedValues(
            "model.attention.drop_head.importance_power", (None, 0.0), "its groups of heads are scored apart"
        ),
    )

    def __init__(
        self,
        in_features: int,
        num_heads: int | Sequence[int],
        *,
        patch_sizes: Annotated[tuple[int, ...], "[1, inf)"] = (1, 2, 4),
        head_dim: int | Sequence[int | None] | None = None,
        dropout_rate: float | Sequence[float] = 0.0,
        grid: tuple[int, int] | None = None,
        rngs: nnx.Rngs,
        **choices: Any,
    ):
        if not isinstance(patch_sizes, list | tuple | np.ndarray):
            raise TypeError(f"MultiScaleAttention: patch_sizes must be one or more sizes, got {patch_sizes!r}")
        if len(patch_sizes) < 1:
            raise ValueError(f"MultiScaleAttention: patch_sizes must be one or more sizes, got {patch_sizes!r}")
        for size in patch_sizes:
            check_integers("MultiScaleAttention", patch_sizes=size)
        levels = len(patch_sizes)

        def each(name: str, given: Any) -> Sequence[Any]:
            values = tuple(given) if isinstance(given, list | tuple | np.ndarray) else (given,) * levels
            if len(values) != levels:
                raise ValueError(f"MultiScaleAttention: {name} has {len(values)} values for {levels} patch sizes")
            return values

        heads, widths, rates = (
            each("num_heads", num_heads),
            each("head_dim", head_dim),
            each("dropout_rate", dropout_rate),
        )
        if choices.get("position") is not None:
            raise ValueError("MultiScaleAttention: position is of single tokens, add it to the input")
        self.patch_sizes, self.grid = tuple(map(int, patch_sizes)), as_grid("MultiScaleAttention", grid)
        self.levels = nnx.List(
            MultiHeadAttention(in_features, h, head_dim=w, dropout_rate=r, rngs=rngs, **choices)
            for h, w, r in zip(heads, widths, rates)
        )
        types = {name: choices[name] for name in ("dtype", "param_dtype", "precision") if name in choices}
        self.fusion = nnx.Linear(in_features, levels, kernel_init=jax.nn.initializers.zeros, rngs=rngs, **types)

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array | None = None,
        value: jax.Array | None = None,
        *,
        mask: Mask | None = None,
        bias: None = None,
        key_padding_mask: jax.Array | None = None,
        head_gate: jax.Array | None = None,
        deterministic: bool = True,
        rngs: nnx.Rngs | jax.Array | None = None,
        step: int | jax.Array | None = None,
        return_weights: bool | Literal["average"] = False,
    ) -> Any:
        """As `MultiHeadAttention`; `head_gate` covers the heads of all levels in order, weights come as one array a
        level.
        """
        causal = isinstance(mask, CausalMask) and isinstance(mask.offset, int) and mask.offset == 0
        if bias is not None or not (mask is None or (causal and self.grid is None)):
            raise ValueError("MultiScaleAttention: mask must be None or CausalMask() (not with grid), and bias None")
        first, counts = self.levels[0], [level.num_heads for level in self.levels]
        widths = (first.in_features, first.key_features, first.value_features)
        query, key, value = check_inputs("MultiScaleAttention", widths, query, key, value)
        if self.grid is not None and key.shape[1] != math.prod(self.grid):
            raise ValueError(f"MultiScaleAttention: {key.shape[1]} keys do not fill the grid {self.grid}")
        if key_padding_mask is not None:
            key_padding_mask = as_padding(key_padding_mask, *key.shape[:2])
        head_gate = as_gate(head_gate, query.shape[0], sum(counts))
        ends = [sum(counts[: i + 1]) for i in range(len(counts) - 1)]
        gates = [None] * len(counts) if head_gate is None else jnp.split(head_gate, ends, axis=-1)
        fusion = jax.nn.softmax(self.fusion(query), axis=-1)
        outputs, weights = [], []
        for i, (level, size, gate) in enumerate(zip(self.levels, self.patch_sizes, gates)):
            pooled, real = pool_patches(key, size, key_padding_mask, self.grid)
            pooled_value = pooled if value is key else pool_patches(value, size, key_padding_mask, self.grid)[0]
            own_rngs = rngs if rngs is None or isinstance(rngs, nnx.Rngs) else jax.random.fold_in(rngs, i)
            result = level(
                query, pooled, pooled_value, mask=PatchCausalMask(size) if causal else None, key_padding_mask=real,
                head_gate=gate, deterministic=deterministic, rngs=own_rngs, step=step, return_weights=return_weights,
            )  # fmt: skip
            if return_weights:
                result, level_weights = result
                weights.append(level_weights)
            outputs.append(fusion[..., i : i + 1] * result)
        return (sum(outputs), weights) if return_weights else sum(outputs)

    def init_cache(self, *arguments: Any, **options: Any) -> DecodeCache:
        raise ValueError(NO_DECODING)

    def decode(self, *arguments: Any, **options: Any) -> tuple[jax.Array, DecodeCache]:
        raise ValueError(NO_DECODING)
