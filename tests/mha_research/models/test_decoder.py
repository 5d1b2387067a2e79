"""The decoder is causal, keeps packed documents apart, decodes as it predicts, and counts its own operations."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mha_kernels import CausalMask
from mha_research.attention import Alibi, MultiHeadAttention, Rotary
from mha_research.models import DecoderLM, sample

VOCABULARY, LENGTH, WIDTH = 11, 7, 12


def make(
    attention_position: Any = None,
    seed: int = 0,
    attention_dropout: float = 0.0,
    num_layers: int = 1,
    implementation: str = "auto",
    **options: Any,
) -> DecoderLM:
    def attention(layer: int, rngs: nnx.Rngs) -> MultiHeadAttention:
        return MultiHeadAttention(
            WIDTH,
            3,
            position=attention_position,
            dtype=options.get("dtype", jnp.float32),
            dropout_rate=attention_dropout,
            implementation=implementation,
            rngs=rngs,
        )

    return DecoderLM(VOCABULARY, num_layers, WIDTH, attention, length=LENGTH, rngs=nnx.Rngs(seed), **options)


@functools.partial(jax.jit, static_argnums=0)
def _forward(graphdef: Any, state: Any, *args: Any, **options: Any) -> jax.Array:
    return nnx.merge(graphdef, state)(*args, **options)


def run(model: DecoderLM, *args: Any, **options: Any) -> jax.Array:
    """model(*args, **options), compiled, for operation by operation takes seconds."""
    return _forward(*nnx.split(model), *args, **options)


@functools.partial(jax.jit, static_argnums=0)
def _decode(graphdef: Any, state: Any, tokens: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
    return nnx.merge(graphdef, state).decode(tokens, cache)


@pytest.fixture
def tokens() -> jax.Array:
    return jax.random.randint(jax.random.key(1), (2, LENGTH), 0, VOCABULARY)


@pytest.mark.parametrize("options", [{}, {"norm_placement": "post", "norm": "layer_norm"}, {"position": "learned"}])
def test_no_output_depends_on_a_later_token(options: dict[str, Any], tokens: jax.Array) -> None:
    model = make(Rotary(), **options)
    at = 4
    changed = tokens.at[:, at].set((tokens[:, at] + 1) % VOCABULARY)
    difference = jnp.abs(run(model, tokens) - run(model, changed)).max(axis=(0, 2))
    np.testing.assert_array_equal(difference[:at], 0)
    assert (difference[at:] > 0).all()


@functools.partial(jax.jit, static_argnums=0)
def _looked_at(graphdef: Any, state: Any, *args: Any) -> tuple[list[jax.Array], list[Any]]:
    model = nnx.merge(graphdef, state)
    return model.attention_weights(*args), model.head_statistics(*args)


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_head_statistics_are_those_of_the_probabilities(placement: str, tokens: jax.Array) -> None:
    model = make(Rotary(), norm_placement=placement, num_layers=2)
    segments = jnp.broadcast_to(jnp.where(jnp.arange(LENGTH) < 3, 1, 2), tokens.shape)
    weights, statistics = _looked_at(*nnx.split(model), tokens, None, segments)
    query, key = np.indices((LENGTH, LENGTH))
    for layer, found in zip(weights, statistics, strict=True):
        p = np.asarray(layer, np.float64)
        logarithm = np.log(p, out=np.zeros_like(p), where=p > 0)
        expected = {
            "entropy": -(p * logarithm).sum(-1),
            "max_probability": p.max(-1),
            "distance": (p * abs(query - key)).sum(-1),
            "sink_mass": p[..., 0],
            "previous_mass": (p * (query == key + 1)).sum(-1),
        }
        assert found.entropy.shape == (2, 3, LENGTH)
        for name, value in expected.items():
            np.testing.assert_allclose(getattr(found, name), value, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("kind,position", [("none", Rotary()), ("sinusoidal", Alibi()), ("learned", None)])
def test_packed_documents_are_as_if_alone(kind: str, position: Any, tokens: jax.Array) -> None:
    model = make(position, position=kind)
    cut = 3
    segments = jnp.broadcast_to(jnp.where(jnp.arange(LENGTH) < cut, 1, 2), tokens.shape)
    positions = jnp.broadcast_to(jnp.where(jnp.arange(LENGTH) < cut, 0, -cut) + jnp.arange(LENGTH), tokens.shape)
    packed = run(model, tokens, positions, segments)
    alone = jnp.concatenate([run(model, tokens[:, :cut]), run(model, tokens[:, cut:])], axis=1)
    np.testing.assert_allclose(packed, alone, atol=2e-6)


@pytest.mark.parametrize("kind", ["none", "sinusoidal", "learned"])
def test_decoding_in_pieces_gives_the_same_logits(kind: str, tokens: jax.Array) -> None:
    model = make(Rotary(), position=kind)
    cache, pieces = model.init_cache(2, LENGTH), []
    for start, end in ((0, 3), (3, 4), (4, LENGTH)):
        logits, cache = _decode(*nnx.split(model), tokens[:, start:end], cache)
        pieces.append(logits)
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), run(model, tokens), atol=2e-6)
    assert int(cache.seen) == LENGTH


def test_remat_changes_no_gradient(tokens: jax.Array) -> None:
    def gradient(remat: bool) -> Any:
        options = {"implementation": "reference", "dropout_rate": 0.4, "attention_dropout": 0.3}
        graphdef, state = nnx.split(make(Rotary(), num_layers=2, remat=remat, **options))

        def loss(state: Any) -> jax.Array:
            return jnp.sum(nnx.merge(graphdef, state)(tokens, key=jax.random.key(5)) ** 2)

        return jax.tree.leaves(nnx.to_pure_dict(jax.jit(jax.grad(loss))(state)))

    for plain, again in zip(gradient(False), gradient(True)):
        np.testing.assert_allclose(plain, again, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("where", ["dropout_rate", "attention_dropout"])
def test_without_a_key_dropout_is_off_to_the_bit(where: str, tokens: jax.Array) -> None:
    """S11 at the level of the model: parameters are shared, so every difference would be the dropout's."""
    plain, dropping = make(Rotary()), make(Rotary(), **{where: 0.8})
    np.testing.assert_array_equal(run(plain, tokens), run(dropping, tokens))
    np.testing.assert_array_equal(run(dropping, tokens), run(dropping, tokens))
    first, second = (run(dropping, tokens, key=jax.random.key(seed)) for seed in (0, 1))
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(first, run(dropping, tokens, key=jax.random.key(0)))


@pytest.mark.parametrize("rate", [-0.1, float("nan"), 1.5, 1.0])
def test_a_rate_that_is_no_probability_is_refused(rate: float) -> None:
    """S12: for the residual dropout and for that of the attention."""
    with pytest.raises(ValueError, match=rf"dropout_rate must be in \[0, 1\), got {rate}"):
        make(dropout_rate=rate)
    with pytest.raises(ValueError, match=rf"dropout_rate must be in \[0, 1\), got {rate}"):
        make(attention_dropout=rate)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_computes_close_to_single_with_single_parameters(dtype: Any, tokens: jax.Array) -> None:
    """S14: masked float16 is finite, forward and backward; logits and parameters are float32.

    The dense implementation, for XLA takes most of a minute to compile the loops of the other one in float16.
    """
    implementation = "reference" if dtype == jnp.float16 else "auto"
    model, exact = make(Rotary(), dtype=dtype, implementation=implementation), make(Rotary())
    segments = jnp.broadcast_to(jnp.arange(LENGTH) // 3, tokens.shape)
    graphdef, state = nnx.split(model)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.to_pure_dict(state))} == {jnp.dtype(jnp.float32)}

    def mean_square(state: Any) -> tuple[jax.Array, jax.Array]:
        logits = nnx.merge(graphdef, state)(tokens, segments=segments)
        return jnp.mean(logits**2), logits

    (_, logits), gradient = jax.jit(jax.value_and_grad(mean_square, has_aux=True))(state)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, run(exact, tokens, segments=segments), atol=0.06)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(nnx.to_pure_dict(gradient)))


def test_learned_positions_beyond_the_table_are_not_a_number() -> None:
    model = make(position="learned")
    assert jnp.isfinite(run(model, jnp.zeros((1, LENGTH), jnp.int32))).all()
    assert jnp.isnan(run(model, jnp.zeros((1, LENGTH + 2), jnp.int32))[:, LENGTH:]).all()


@pytest.mark.parametrize("options", [{}, {"activation": "swiglu", "tie_embeddings": False, "mlp_width": 40}])
def test_flops_are_near_what_xla_counts(options: dict[str, Any]) -> None:
    """XLA also counts softmax, norms and activations, a few percent at this size."""

    def attention(layer: int, rngs: nnx.Rngs) -> MultiHeadAttention:
        return MultiHeadAttention(64, 4, implementation="reference", rngs=rngs)

    model = DecoderLM(31, 2, 64, attention, length=48, rngs=nnx.Rngs(0), **options)
    graphdef, state = nnx.split(model)
    forward = jax.jit(lambda state, tokens: nnx.merge(graphdef, state)(tokens))
    cost = forward.lower(state, jnp.zeros((3, 48), jnp.int32)).compile().cost_analysis()
    assert 3 * model.forward_flops(48) == pytest.approx(cost["flops"], rel=0.08)


@pytest.mark.parametrize("norm_placement", ["pre", "post"])
def test_attention_weights_are_those_that_the_model_uses(norm_placement: str, tokens: jax.Array) -> None:
    """Rebuilds the output of a layer from its weights: values and output projection are linear in them."""
    model = make(Rotary(), num_layers=2, norm_placement=norm_placement)

    @jax.jit
    def looked_at(tokens: jax.Array) -> Any:
        weights, block = model.attention_weights(tokens), model.blocks[0]
        x = model.embed(tokens)
        inputs = block.attention_norm(x) if norm_placement == "pre" else x
        heads = jnp.einsum("bhij,bjhe->bihe", weights[0], block.attention.value(inputs))
        return weights, block.attention.output(heads), block.attention(inputs, mask=CausalMask())

    weights, rebuilt, output = looked_at(tokens)
    assert [layer.shape for layer in weights] == [(2, 3, LENGTH, LENGTH)] * 2
    np.testing.assert_allclose(rebuilt, output, atol=1e-6)
    for layer in weights:
        np.testing.assert_allclose(layer.sum(-1), 1, atol=1e-6)
        np.testing.assert_array_equal(np.triu(layer, 1), 0)


def test_flops_by_hand() -> None:
    # Kernels of a block: 4 projections of 12 x 12 and an MLP of 2 x 12 x 48; tied logits 12 x 11; scores and values.
    by_hand = 2 * LENGTH * (2 * (4 * 144 + 2 * 12 * 48) + 12 * 11) + 2 * LENGTH**2 * 2 * (12 + 12)
    assert make(num_layers=2).forward_flops(LENGTH) == by_hand


def test_a_sample_follows_the_logits() -> None:
    model = make(Rotary(), seed=3)
    prompt = jnp.array([4, 2])
    greedy = sample(model, prompt, 4, jax.random.key(0), temperature=0)
    sequence = list(prompt)
    for token in greedy:
        padded = sequence + [0] * (6 - len(sequence))
        assert int(token) == int(jnp.argmax(run(model, jnp.array([padded]))[0, len(sequence) - 1]))
        sequence.append(token)
    draws = [sample(model, prompt, 50, jax.random.key(seed), forbidden=(5,)) for seed in (0, 1, 2, 3, 0)]
    assert set(np.concatenate(draws).tolist()) == set(range(VOCABULARY)) - {5}
    np.testing.assert_array_equal(draws[0], draws[-1])
    with pytest.raises(ValueError, match=r"sample needs a prompt of one or more tokens.*got shape \(0,\), 3 and 1\.0"):
        sample(model, jnp.zeros(0, jnp.int32), 3, jax.random.key(0))


def test_a_sample_reads_no_more_than_its_context_at_once() -> None:
    """Where five tokens are full it goes on from the last two; a prompt that is longer is cut as well."""
    model = make(Rotary(), seed=3)
    sequence = [4, 2, 1, 3, 4, 2, 2]
    found = sample(model, jnp.array(sequence), 9, jax.random.key(0), temperature=0, context=5)
    window: list[int] = sequence[-2:]
    for token in found:
        if len(window) > 5:
            window = window[-2:]
        logits = run(model, jnp.array([window + [0] * (5 - len(window))]))[0, len(window) - 1]
        assert int(token) == int(jnp.argmax(logits))
        window.append(int(token))
    assert sample(model, jnp.array([4]), 3, jax.random.key(0), context=1).shape == (3,)
    with pytest.raises(ValueError, match="context of one or more tokens, got 0"):
        sample(model, jnp.array([4]), 3, jax.random.key(0), context=0)
