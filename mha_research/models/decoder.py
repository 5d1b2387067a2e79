"""A decoder language model: embeddings, blocks of causal attention and MLP, and the logits of the next token."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mha_kernels import CausalMask, HeadStatistics, Mask, SegmentMask
from mha_research.attention.cost import multiplications
from mha_research.attention.layers.product import flat_dot_general, product
from mha_research.attention.positions import sinusoidal_at
from mha_research.models.heads import head_statistics
from mha_research.models.model import Model
from mha_research.models.mlp import NORMS, Mlp, dropout


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); with placement `post`, norm(x + branch(x)) for both.

    x is (B, L, D). Pre-norm: Xiong et al. 2020 (arXiv:2002.04745); post-norm: Vaswani et al. 2017.
    """

    def __init__(
        self,
        attention: Any,  # MultiHeadAttention, or a variant with the same call
        mlp: Mlp,
        norms: tuple[nnx.Module, nnx.Module],
        norm_placement: str,
        dropout_rate: float,
    ) -> None:
        self.attention, self.mlp = attention, mlp
        self.attention_norm, self.mlp_norm = norms
        self.norm_placement, self.dropout_rate = norm_placement, dropout_rate

    def __call__(
        self,
        x: jax.Array,
        mask: Mask,
        key: jax.Array | None = None,
        step: jax.Array | None = None,
        head_gate: jax.Array | None = None,
    ) -> jax.Array:
        """One block on x (B, L, D); a key turns every dropout on, `step` is for those with a schedule, `head_gate`
        (B, H) multiplies the heads."""
        keys = (None, None, None) if key is None else tuple(jax.random.split(key, 3))

        def attend(x: jax.Array) -> jax.Array:
            options = {"deterministic": key is None, "rngs": keys[0], "step": step, "head_gate": head_gate}
            return self.attention(x, mask=mask, **options)

        x = self._residual(x, attend, self.attention_norm, keys[1])
        return self._residual(x, self.mlp, self.mlp_norm, keys[2])

    def attention_weights(self, x: jax.Array, mask: Mask) -> jax.Array:
        """The weights (B, H, L, L) with which the block attends, before any dropout; of most kinds, probabilities.

        Raises ValueError for an attention that has no weight for each token.
        """
        x = self.attention_norm(x) if self.norm_placement == "pre" else x
        weights = self.attention(x, mask=mask, return_weights=True)[1]
        if not isinstance(weights, jax.Array):
            raise ValueError(f"{type(self.attention).__name__} has no weight for each token")
        return weights

    def head_statistics(self, x: jax.Array, mask: Mask) -> HeadStatistics:
        """What each head does at each query, (B, H, L) each, before any dropout and in O(L) memory."""
        x = self.attention_norm(x) if self.norm_placement == "pre" else x
        return head_statistics(self.attention, x, x, x, mask)

    def decode(self, x: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        """The same for T more tokens (B, T, D) after those in the cache."""
        new_cache = cache

        def attend(x: jax.Array) -> jax.Array:
            nonlocal new_cache
            output, new_cache = self.attention.decode(x, cache)
            return output

        x = self._residual(x, attend, self.attention_norm, None)
        return self._residual(x, self.mlp, self.mlp_norm, None), new_cache

    def _residual(
        self, x: jax.Array, branch: Callable[[jax.Array], jax.Array], norm: nnx.Module, key: jax.Array | None
    ) -> jax.Array:
        if self.norm_placement == "pre":
            return x + dropout(branch(norm(x)), self.dropout_rate, key)
        return norm(x + dropout(branch(x), self.dropout_rate, key))


@functools.partial(jax.jit, static_argnums=0)
def _block(graphdef: Any, state: Any, x: jax.Array, segments: jax.Array | None, *args: Any) -> jax.Array:
    # The mask is made here: as an argument, its offset would be an array, of which nobody can say that it is 0.
    return nnx.merge(graphdef, state)(x, _mask(segments), *args)


@functools.partial(jax.checkpoint, static_argnums=0)
def _recomputed_block(graphdef: Any, state: Any, *args: Any) -> jax.Array:
    return _block(graphdef, state, *args)


def _mask(segments: jax.Array | None) -> Mask:
    """Causal, and within a document where `segments` (B, L) tells documents apart."""
    return CausalMask() if segments is None else CausalMask() & SegmentMask(segments, segments)


class DecoderCache(NamedTuple):
    """What decoding remembers: a cache of each layer's attention, and the number of tokens seen."""

    layers: tuple[Any, ...]
    seen: jax.Array


class DecoderLM(Model):
    """logits_t = W_out norm(block_N(... block_1(embed(token_t) + position_t))), causal.

    Args: `attention(layer=, rngs=)` makes the attention of a block, counted from 1; `position` is what is added to the
    embeddings: none, sinusoidal or learned (a table of `length` rows, started at N(0, 0.02)); `dropout_rate` acts on
    the embeddings and on each branch; `remat` recomputes blocks in the backward pass; `dtype` is that of the
    computation, while parameters and logits are float32. Embeddings start at N(0, 1/D), so that the tied output gives
    logits of unit variance. Raises ValueError for a dropout rate outside [0, 1), NaN included.
    """

    def __init__(
        self,
        vocabulary_size: int,
        num_layers: int,
        d_model: int,
        attention: Callable[..., Any],
        *,
        length: int,
        position: str = "none",
        norm: str = "rms_norm",
        norm_placement: str = "pre",
        mlp_width: int | None = None,
        activation: str = "gelu",
        mlp_bias: bool = False,
        dropout_rate: float = 0.0,
        tie_embeddings: bool = True,
        remat: bool = False,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        if not 0 <= dropout_rate < 1:
            raise ValueError(f"model.dropout_rate must be in [0, 1), got {dropout_rate}")
        if min(num_layers, d_model) < 1:
            raise ValueError(f"model.num_layers and model.d_model must be 1 or more, got {num_layers} and {d_model}")

        def make_norm() -> nnx.Module:
            return NORMS[norm](d_model, dtype=dtype, rngs=rngs)

        self.embed = nnx.Embed(
            vocabulary_size, d_model, dtype=dtype, embedding_init=nnx.initializers.normal(d_model**-0.5), rngs=rngs
        )
        self.table = (
            nnx.Param(0.02 * jax.random.normal(rngs.params(), (length, d_model))) if position == "learned" else None
        )
        self.blocks = nnx.List(
            Block(
                attention(layer=layer, rngs=rngs),
                Mlp(d_model, mlp_width or 4 * d_model, activation, mlp_bias, dtype, rngs=rngs),
                (make_norm(), make_norm()),
                norm_placement,
                dropout_rate,
            )
            for layer in range(1, num_layers + 1)
        )
        self.norm = make_norm() if norm_placement == "pre" else None
        self.output = (
            None
            if tie_embeddings
            else nnx.Linear(
                d_model, vocabulary_size, use_bias=False, dtype=dtype, dot_general=flat_dot_general, rngs=rngs
            )
        )
        self.position, self.dropout_rate, self.remat, self.dtype = position, dropout_rate, remat, dtype

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
        *,
        key: jax.Array | None = None,
        step: jax.Array | None = None,
        head_gates: jax.Array | None = None,
    ) -> jax.Array:
        """Logits (B, L, vocabulary), float32, of the token after each of `tokens` (B, L).

        `positions` (B, L) counts from 0 in each packed document (0 ... L-1 unless given); tokens of unequal `segments`
        (B, L) do not see each other. A `key` turns every dropout on; without one the result is deterministic.
        `head_gates` (N, B, H) or (N, H) multiply the heads of the N blocks.
        """
        keys = [None] * (len(self.blocks) + 1) if key is None else list(jax.random.split(key, len(self.blocks) + 1))
        x = dropout(self._embed(tokens, positions), self.dropout_rate, keys[-1])
        gates = [None] * len(self.blocks) if head_gates is None else list(head_gates)
        for block, block_key, gate in zip(self.blocks, keys, gates):
            x = self._apply(block, x, segments, block_key, step, gate)
        return self._logits(x)

    def attention_weights(
        self, tokens: jax.Array, positions: jax.Array | None = None, segments: jax.Array | None = None
    ) -> list[jax.Array]:
        """What every head attends to: (B, H, L, L) for each layer, rows are queries. Dense, for looking at."""
        x, mask, weights = self._embed(tokens, positions), _mask(segments), []
        for block in self.blocks:
            weights.append(block.attention_weights(x, mask))
            x = block(x, mask)
        return weights

    def head_statistics(
        self, tokens: jax.Array, positions: jax.Array | None = None, segments: jax.Array | None = None
    ) -> list[HeadStatistics]:
        """`HEAD_STATISTICS` of every head at every query, (B, H, L) each, layer by layer."""
        x, mask, found = self._embed(tokens, positions), _mask(segments), []
        for block in self.blocks:
            found.append(block.head_statistics(x, mask))
            x = block(x, mask)
        return found

    def init_cache(self, batch_size: int, capacity: int) -> DecoderCache:
        """An empty cache for `capacity` tokens of each of `batch_size` sequences."""
        layers = tuple(block.attention.init_cache(batch_size, capacity) for block in self.blocks)
        return DecoderCache(layers, jnp.zeros((), jnp.int32))

    def decode(self, tokens: jax.Array, cache: DecoderCache) -> tuple[jax.Array, DecoderCache]:
        """Logits (B, T, vocabulary) of T more tokens (B, T), and the cache that remembers them."""
        x = self._embed(tokens, cache.seen + jnp.arange(tokens.shape[1])[None])
        layers = []
        for block, layer in zip(self.blocks, cache.layers):
            x, layer = block.decode(x, layer)
            layers.append(layer)
        return self._logits(x), DecoderCache(tuple(layers), cache.seen + tokens.shape[1])

    def _apply(self, block: Block, *args: Any) -> jax.Array:
        # As functions of arrays: blocks of one kind are traced once, however many there are.
        graphdef, state = nnx.split(block)
        return (_recomputed_block if self.remat else _block)(graphdef, state, *args)

    def _embed(self, tokens: jax.Array, positions: jax.Array | None) -> jax.Array:
        positions = jnp.arange(tokens.shape[1])[None] if positions is None else positions
        d_model = self.embed.features
        x = self.embed(tokens)
        if self.table is not None:
            # A position beyond the table gives NaN, never the row of another position.
            x = x + self.table[...].at[positions].get(mode="fill", fill_value=jnp.nan).astype(self.dtype)
        elif self.position == "sinusoidal":
            x = x + sinusoidal_at(positions, d_model).astype(self.dtype)
        return x

    def _logits(self, x: jax.Array) -> jax.Array:
        x = x if self.norm is None else self.norm(x)
        logits = product(x, self.embed.embedding[...].T.astype(self.dtype)) if self.output is None else self.output(x)
        return logits.astype(jnp.float32)

    def forward_flops(self, length: int) -> int:
        """Floating-point operations of one example's forward pass, counting matrix products only, two a multiply-add.

        sum over kernels of 2 L size, plus 2 L D vocabulary for tied logits, plus 2 L^2 H (E + V) for scores and values
        of each layer of plain attention, causal masking not subtracted (Chowdhery et al. 2022, arXiv:2204.02311,
        appendix B); of other kinds see `multiplications`. A training step is three forward passes.
        """
        kernels = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(self, nnx.Param)))
        names = [([part.key for part in path], leaf.size) for path, leaf in kernels]
        size = sum(size for path, size in names if path[-1] == "kernel" and "attention" not in path)
        size += 0 if self.output is not None else self.embed.num_embeddings * self.embed.features
        attention = sum(multiplications(block.attention, length, length, causal=True) for block in self.blocks)
        return 2 * (length * size + attention)
