"""The update rule: clipping, AdamW or SGD, decay on kernels only, and the schedule of the rate."""

from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from mha_research.config import SCHEMA
from mha_research.config.doors import chosen
from mha_research.config.signature import accepts
from mha_research.factory.errors import as_config_error

Rate = Annotated[float, "[0, 1)"]
NotNegative = Annotated[float, "[0, inf)"]


def adamw(
    learning_rate: optax.Schedule,
    mask: Callable[[Any], Any],
    b1: Rate = 0.9,
    b2: Rate = 0.95,
    eps: Annotated[float, "(0, inf)"] = 1e-8,
    weight_decay: NotNegative = 0.1,
) -> optax.GradientTransformation:
    """AdamW, Loshchilov & Hutter 2019 (arXiv:1711.05101).

    Args:
        b1: decay of the first moment
        b2: decay of the second moment
        eps: added to the root of the second moment
        weight_decay: on kernels only, times the rate
    """
    return optax.adamw(learning_rate, b1, b2, eps, weight_decay=weight_decay, mask=mask)


def sgd(learning_rate: optax.Schedule, momentum: Rate = 0.0) -> optax.GradientTransformation:
    """Stochastic gradient descent with a heavy ball.

    Args:
        momentum: of the heavy ball
    """
    return optax.sgd(learning_rate, momentum or None)


def constant(learning_rate: float) -> optax.Schedule:
    """The rate r."""
    return optax.constant_schedule(learning_rate)


def cosine(learning_rate: float, decay_steps: int, final_fraction: NotNegative = 0.1) -> optax.Schedule:
    """r (f + (1 - f)(1 + cos pi t)/2), t the share of the `decay_steps` that are over.

    Args:
        final_fraction: last rate over peak rate
    """
    return optax.cosine_decay_schedule(learning_rate, decay_steps, final_fraction)


def linear(learning_rate: float, decay_steps: int, final_fraction: NotNegative = 0.1) -> optax.Schedule:
    """r (1 - (1 - f) t), t the share of the `decay_steps` that are over.

    Args:
        final_fraction: last rate over peak rate
    """
    return optax.linear_schedule(learning_rate, learning_rate * final_fraction, decay_steps)


def inverse_sqrt(learning_rate: float, warmup_steps: int) -> optax.Schedule:
    """r sqrt(warmup / n) at update n (Vaswani et al. 2017, section 5.3)."""
    return lambda n: learning_rate * (1 + jnp.maximum(n, 0) / max(1, warmup_steps)) ** -0.5


def decayed(params: Any) -> Any:
    """True for the parameters that weight decay acts on: those named `kernel`, whatever their rank.

    Biases, norm scales, embeddings and position tables are never decayed.
    """
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "kernel", params)


def build_schedule(config: ConfigDict) -> optax.Schedule:
    """The rate at update n: linear from 0 over `warmup_steps`, then the chosen schedule until `train.steps`."""
    options = config.optimizer
    rate, warmup = options.learning_rate, options.warmup_steps
    decay_steps = max(1, config.train.steps - warmup)
    after = _make(
        config, "optimizer.schedule", learning_rate=rate, warmup_steps=warmup, decay_steps=decay_steps
    )
    # The n-th update (from 1) has rate n / warmup of the peak, so that no update is wasted at rate 0.
    rise = optax.linear_schedule(rate / max(1, warmup), rate, max(1, warmup - 1))
    return optax.join_schedules([rise, after], [warmup]) if warmup else after


def build_optimizer(config: ConfigDict) -> optax.GradientTransformation:
    """The whole chain from mean gradient to update.

    A rule is given the schedule as `learning_rate` and, where it takes one, the `mask` of what is decayed.
    """
    options = config.optimizer
    clip = optax.identity() if options.clip_norm is None else optax.clip_by_global_norm(options.clip_norm)
    return optax.chain(
        clip, _make(config, "optimizer.rule", learning_rate=build_schedule(config), mask=decayed)
    )


def _make(config: ConfigDict, path: str, **given: Any) -> Any:
    """What the chosen function gives for its own fields and for what it takes of the `given`."""
    make, fields = chosen(SCHEMA, config, path)
    assert make is not None
    taken = {name: value for name, value in given.items() if accepts(make, name)}
    return as_config_error(path, lambda: make(**taken, **fields))
