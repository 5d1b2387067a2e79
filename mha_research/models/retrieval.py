"""The smallest model that looks items up: attention and a linear read-out, so that no MLP hides the limits of heads."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mha_kernels import HeadStatistics
from mha_research.attention.cost import multiplications
from mha_research.models.heads import head_statistics
from mha_research.models.model import Model


class SlotRetrieval(Model):
    """x = sum_s embed_s(query_s), then x + attention(x, embed(ids), values) for each layer, then a linear read-out.

    Keys come from the ids alone and values go into every layer as they are, so the weights of the first layer do not
    depend on the values and each of its heads returns one weighted mean of them. Args: `attention(layer=,
    key_features=, value_features=, rngs=)` makes a layer, counted from 1; `spec` is that of the
    task (`Retrieval`), with its n items, k slots and p features.
    Raises ValueError for a size below 1.
    """

    def __init__(
        self,
        num_layers: int,
        d_model: int,
        attention: Callable[..., Any],
        *,
        spec: Any,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        if min(num_layers, d_model) < 1:
            raise ValueError(f"model.num_layers and model.d_model must be 1 or more, got {num_layers} and {d_model}")

        items, slots, features = spec.vocabulary_size, spec.slots, spec.features

        def embedding(rows: int) -> nnx.Embed:
            return nnx.Embed(rows, d_model, dtype=dtype, embedding_init=nnx.initializers.normal(1.0), rngs=rngs)

        self.slots, self.items = slots, items
        self.key_embed, self.query_embed = embedding(items), embedding(slots * items)  # of the ids, slot by slot
        self.layers = nnx.List(
            attention(layer=layer, key_features=d_model, value_features=features, rngs=rngs)
            for layer in range(1, num_layers + 1)
        )
        self.output = nnx.Linear(d_model, slots * features, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        ids: jax.Array,
        values: jax.Array,
        queries: jax.Array,
        *,
        key: jax.Array | None = None,
        step: jax.Array | None = None,
        head_gates: jax.Array | None = None,
    ) -> jax.Array:
        """(B, 1, k p), float32, from ids (B, n), values (B, n, p) and queries (B, k); a `key` turns every dropout on.

        `head_gates` (N, B, H) or (N, H) multiply the heads of the N layers.
        """
        count = len(self.layers)
        keys = [None] * count if key is None else list(jax.random.split(key, count))
        gates = [None] * count if head_gates is None else list(head_gates)
        x, items = self._embed(ids, queries)
        for layer, layer_key, gate in zip(self.layers, keys, gates):
            options = {"deterministic": key is None, "rngs": layer_key, "step": step, "head_gate": gate}
            x = x + layer(x, items, values, **options)
        return self.output(x).astype(jnp.float32)

    def head_statistics(self, ids: jax.Array, values: jax.Array, queries: jax.Array) -> list[HeadStatistics]:
        """`HEAD_STATISTICS` of every head, (B, H, 1) each, layer by layer."""
        x, items = self._embed(ids, queries)
        found = []
        for layer in self.layers:
            found.append(head_statistics(layer, x, items, values))
            x = x + layer(x, items, values)
        return found

    def _embed(self, ids: jax.Array, queries: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(the query (B, 1, D), the keys (B, n, D))."""
        rows = queries + self.items * jnp.arange(self.slots)[None]
        return jnp.sum(self.query_embed(rows), axis=1, keepdims=True), self.key_embed(ids)

    def forward_flops(self, length: int) -> int:
        """Operations of one example's forward pass, matrix products only: keys and values of `length` items."""
        return 2 * (self.output.kernel.size + sum(multiplications(layer, 1, length) for layer in self.layers))
