"""The look-up model: its weights do not depend on the values, so the floor of its error is a theorem."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.linalg import orth

from mha_research.attention import MultiHeadAttention
from mha_research.models import SlotRetrieval
from mha_research.tasks import Retrieval

ITEMS, SLOTS, WIDTH, D = 7, 3, 2, 30
Batch = tuple[jax.Array, jax.Array, jax.Array]


def make(num_layers: int = 1, heads: int = 2) -> SlotRetrieval:
    def attention(layer: int, **sizes: Any) -> MultiHeadAttention:
        return MultiHeadAttention(D, heads, implementation="reference", use_bias=False, **sizes)

    return SlotRetrieval(num_layers, D, attention, items=ITEMS, slots=SLOTS, features=WIDTH, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def drawn() -> dict[str, jax.Array]:
    return Retrieval(SLOTS, ITEMS, WIDTH).train_batches(1, 11)[0]


@pytest.fixture(scope="module")
def batch(drawn: dict[str, jax.Array]) -> Batch:
    return drawn["ids"], drawn["values"], drawn["queries"]


def test_blind_to_the_order_of_the_items_but_not_of_the_slots(batch: Batch) -> None:
    ids, values, queries = batch
    graphdef, state = nnx.split(make())
    model = jax.jit(lambda *batch: nnx.merge(graphdef, state)(*batch))
    output, order = model(*batch), np.random.default_rng(2).permutation(ITEMS)
    assert (output.shape, output.dtype) == ((11, 1, SLOTS * WIDTH), jnp.float32)
    np.testing.assert_allclose(model(ids[:, order], values[:, order], queries), output, atol=1e-5)
    assert jnp.abs(model(ids, values, queries[:, ::-1]) - output).max() > 0.1


@pytest.mark.parametrize("heads", [1, 2, 5])
def test_one_layer_is_affine_in_the_values_and_its_rank_is_that_of_the_theorem(batch: Batch, heads: int) -> None:
    """So the best read-out of what the heads return leaves 1 - min(h, k) / k of the targets, or more."""
    ids, values, queries = (array[:1] for array in batch)
    model = make(heads=heads)

    def found(values: jax.Array) -> jax.Array:
        x, items = model._embed(ids, queries)
        return model.layers[0](x, items, values)[0, 0]

    jacobian = np.asarray(jax.jit(jax.jacobian(found))(values)).reshape(D, ITEMS * WIDTH)
    np.testing.assert_allclose(found(values), jacobian @ values.reshape(-1), atol=1e-5)
    seen = orth(jacobian.T, rcond=1e-5)  # the combinations of the values that the read-out can use
    assert seen.shape[1] == min(heads, ITEMS) * WIDTH
    targets = np.kron(np.eye(ITEMS)[np.argsort(ids[0])[queries[0]]], np.eye(WIDTH))
    left = np.mean(np.sum(np.square(targets - targets @ seen @ seen.T), axis=1))
    assert left >= 1 - min(heads, SLOTS) / SLOTS - 1e-6


def test_a_planted_head_for_each_slot_finds_its_values(drawn: dict[str, jax.Array], batch: Batch) -> None:
    """Head s attends to the item that slot s asks for; without a head its slot stays at zero, which is the floor."""
    model = make(heads=SLOTS)
    (layer,) = model.layers
    head_dim, free = D // SLOTS, SLOTS * ITEMS  # rows of x from `free` on are not used by the queries
    query, output = np.zeros((D, SLOTS, head_dim)), np.zeros((SLOTS, head_dim, D))
    for slot in range(SLOTS):
        query[slot * ITEMS : (slot + 1) * ITEMS, slot, :ITEMS] = 100 * np.eye(ITEMS)
        output[slot, :WIDTH, free + slot * WIDTH : free + (slot + 1) * WIDTH] = np.eye(WIDTH)
    for parameter, planted in (
        (model.key_embed.embedding, np.eye(ITEMS, D)),
        (model.query_embed.embedding, np.eye(SLOTS * ITEMS, D)),
        (layer.query.kernel, query),
        (layer.key.kernel, np.tile(np.eye(D, head_dim)[:, None], (1, SLOTS, 1))),
        (layer.value.kernel, np.tile(np.eye(WIDTH, head_dim)[:, None], (1, SLOTS, 1))),
        (layer.output.kernel, output),
        (model.output.kernel, np.eye(D, SLOTS * WIDTH, k=-free)),
    ):
        parameter[...] = jnp.asarray(planted, jnp.float32)
    np.testing.assert_allclose(model(*batch), drawn["targets"], atol=1e-6)
    found = drawn["targets"] * np.repeat([1, 1, 0], WIDTH)
    np.testing.assert_allclose(model(*batch, head_gates=jnp.array([[1.0, 1.0, 0.0]])), found, atol=1e-6)


def test_statistics_and_operations(batch: Batch) -> None:
    model = make(num_layers=2, heads=3)
    statistics = model.head_statistics(*batch)
    assert [layer.entropy.shape for layer in statistics] == [(11, 3, 1)] * 2
    x, items = model._embed(batch[0], batch[2])
    weights = np.asarray(model.layers[0](x, items, batch[1], return_weights=True)[1], np.float64)
    np.testing.assert_allclose(statistics[0].entropy, -(weights * np.log(weights)).sum(-1), rtol=1e-4)
    # A layer: query and output D x D once, keys D x D and values p x D for every item, scores and means.
    layer = 2 * (2 * D * D) + 2 * ITEMS * (D * D + WIDTH * D) + 2 * ITEMS * (D + D)
    assert model.forward_flops(ITEMS) == 2 * layer + 2 * D * SLOTS * WIDTH
    abstract = nnx.eval_shape(lambda: make(num_layers=2, heads=3))
    assert abstract.forward_flops(ITEMS) == model.forward_flops(ITEMS)
