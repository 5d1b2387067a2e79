"""Text from a trained decoder, one token at a time through its cache."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mha_research.models.decoder import DecoderLM


def sample(
    model: DecoderLM,
    prompt: jax.Array,
    length: int,
    key: jax.Array,
    temperature: float = 1.0,
    forbidden: tuple[int, ...] = (),
    context: int | None = None,
) -> jax.Array:
    """`length` tokens after the prompt (P,), drawn from softmax(logits / temperature); int32 (length,).

    Temperature 0 takes the most probable token; `forbidden` tokens are never drawn. `context` is the most
    tokens that the model reads at once, those it was trained on: beyond them positions mean nothing to most models.
    Where it is full, the model goes on from the last half of it. Deterministic in the key.
    Raises ValueError for an empty prompt, a length below 1, a context below 1 or a negative temperature.
    """
    if prompt.ndim != 1 or not prompt.size or length < 1 or not temperature >= 0:
        raise ValueError(
            f"sample needs a prompt of one or more tokens, length >= 1 and temperature >= 0, "
            f"got shape {prompt.shape}, {length} and {temperature}"
        )
    if context is None:
        context = prompt.size + length
    elif context < 1:
        raise ValueError(f"sample needs a context of one or more tokens, got {context}")
    graphdef, state = nnx.split(model)
    keys = jax.random.split(key, length)
    tokens, begin = jnp.asarray(prompt, jnp.int32), prompt.size
    while (done := tokens.size - begin) < length:
        read = tokens if tokens.size <= context else tokens[-max(1, context // 2) :]
        now = keys[done : done + context - read.size + 1]  # the last token drawn is not read
        tokens = jnp.concatenate([tokens, _continued(graphdef, state, read, now, temperature, forbidden)])
    return tokens[begin:]


@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def _continued(
    graphdef: Any, state: Any, prompt: jax.Array, keys: jax.Array, temperature: float, forbidden: tuple[int, ...]
) -> jax.Array:
    """A token for each key, in one compiled loop."""
    model = nnx.merge(graphdef, state)

    def choose(logits: jax.Array, key: jax.Array) -> jax.Array:
        for token in forbidden:
            logits = logits.at[token].set(-jnp.inf)
        if temperature == 0:
            return jnp.argmax(logits).astype(jnp.int32)
        return jax.random.categorical(key, logits / temperature).astype(jnp.int32)

    def next_token(carry: tuple[jax.Array, Any], key: jax.Array) -> tuple[tuple[jax.Array, Any], jax.Array]:
        logits, cache = carry
        token = choose(logits, key)
        logits, cache = model.decode(token[None, None], cache)
        return (logits[0, -1], cache), token

    logits, cache = model.decode(prompt[None], model.init_cache(1, prompt.size + len(keys)))
    return jax.lax.scan(next_token, (logits[0, -1], cache), keys)[1]
