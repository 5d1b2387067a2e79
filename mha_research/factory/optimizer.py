"""The update rule: clipping, AdamW or SGD, decay on kernels only, and the schedule of the rate."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from mha_research.config import build_choice


def decayed(params: Any) -> Any:
    """True for the parameters that weight decay acts on: those named `kernel`, whatever their rank.

    Biases, norm scales, embeddings and position tables are never decayed.
    """
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "kernel", params)


def build_schedule(config: ConfigDict) -> optax.Schedule:
    """The rate at update n: linear from 0 over `warmup_steps`, then the schedule until `train.steps`.

    constant r; cosine r (f + (1 - f)(1 + cos pi t)/2) and linear r (1 - (1 - f) t) with t the share of the way from the
    end of the warm-up to the last update; inverse_sqrt r sqrt(warmup / n) (Vaswani et al. 2017, section 5.3).
    """
    options = config.optimizer
    rate, warmup = options.learning_rate, options.warmup_steps
    decay_steps = max(1, config.train.steps - warmup)
    after = build_choice(
        options.schedule,
        {
            "constant": lambda: optax.constant_schedule(rate),
            "cosine": lambda final_fraction=0.1: optax.cosine_decay_schedule(rate, decay_steps, final_fraction),
            "linear": lambda final_fraction=0.1: optax.linear_schedule(rate, rate * final_fraction, decay_steps),
            "inverse_sqrt": lambda: lambda n: rate * (1 + jnp.maximum(n, 0) / max(1, warmup)) ** -0.5,
        },
    )
    # The n-th update (from 1) has rate n / warmup of the peak, so that no update is wasted at rate 0.
    rise = optax.linear_schedule(rate / max(1, warmup), rate, max(1, warmup - 1))
    return optax.join_schedules([rise, after], [warmup]) if warmup else after


def build_optimizer(config: ConfigDict) -> optax.GradientTransformation:
    """The whole chain from mean gradient to update."""
    options = config.optimizer
    clip = optax.identity() if options.clip_norm is None else optax.clip_by_global_norm(options.clip_norm)
    schedule = build_schedule(config)
    return optax.chain(
        clip,
        build_choice(
            options.rule,
            {
                "adamw": lambda b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1: optax.adamw(
                    schedule, b1, b2, eps, weight_decay=weight_decay, mask=decayed
                ),
                "sgd": lambda momentum=None: optax.sgd(schedule, momentum),
            },
        ),
    )
