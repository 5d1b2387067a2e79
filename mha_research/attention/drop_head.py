"""DropHead: whole heads are dropped during training, example by example."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from mha_research.attention.arguments import as_array, check_integers, check_numbers, check_rates, one_key

SCHEDULES = ("constant", "linear", "v_shaped")


class HeadImportance(nnx.Variable):
    """Running importance of every head, (H,): read by an importance-weighted `DropHead`, written by whoever trains."""


@dataclasses.dataclass(frozen=True)
class DropHead:
    """xi_h ~ Bernoulli(1 - p_h), gate_h = xi_h * H / sum(xi); all heads are kept (gate 1) where every one would be
    dropped.

    Each example draws its own heads. The gates go into ``head_gate`` of the attention, so a dropped head does no work.
    Zhou et al. 2020, "Scheduled DropHead": the rescaling, the keep-all rule and the V-shaped schedule.

    Args:
      rate: p, in [0, 1). With a schedule, the value that it ends on.
      schedule: "constant"; "linear" from `start_rate` to `rate` over `steps`; "v_shaped" from `start_rate` down to 0 at
        half of `steps`, then up to `rate`. After `steps` the rate stays.
      steps: length of the schedule, required by every schedule but "constant".
      start_rate: where the schedule starts; 0 for "linear" and `rate` for "v_shaped" unless given.
      importance_power: p_h is proportional to importance_h ** power, with mean p (each at most 1): above zero the
        important heads are dropped more often, below zero less often, at zero all alike.

    Raises ValueError for a rate outside [0, 1) (NaN included), an unknown schedule, or a schedule without `steps`, and
    TypeError for what is no number.
    """

    rate: float
    schedule: Literal["constant", "linear", "v_shaped"] = "constant"
    steps: int | None = None
    start_rate: float | None = None
    importance_power: float = 0.0

    def __post_init__(self) -> None:
        check_rates("DropHead", rate=self.rate)
        if self.start_rate is not None:
            check_rates("DropHead", start_rate=self.start_rate)
        check_integers("DropHead", steps=self.steps)
        check_numbers("DropHead", importance_power=self.importance_power)
        if self.schedule not in SCHEDULES:
            raise ValueError(f"DropHead: schedule must be one of {SCHEDULES}, got {self.schedule!r}")
        if self.schedule != "constant" and self.steps is None:
            raise ValueError(f"DropHead: schedule {self.schedule!r} needs steps of at least 1, got None")
        for name in ("rate", "start_rate", "importance_power"):  # a float64 of NumPy would make float64 of float32
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else float(value))

    def rate_at(self, step: int | jax.Array | None) -> float | jax.Array:
        """The rate p at a training step. Raises ValueError when a schedule is not told the step, TypeError when that is
        no number.
        """
        if self.schedule == "constant":
            return self.rate
        if step is None:
            raise ValueError(f"DropHead: schedule {self.schedule!r} needs step, got None")
        assert self.steps is not None
        now = as_array("DropHead: step", step)
        if now.shape != () or not jnp.issubdtype(now.dtype, jnp.number):
            raise TypeError(f"DropHead: step must be a number, got shape {now.shape} and dtype {now.dtype}")
        done = jnp.clip(jnp.asarray(now, jnp.float32) / self.steps, 0.0, 1.0)
        if self.schedule == "linear":
            start = 0.0 if self.start_rate is None else self.start_rate
            return start + (self.rate - start) * done
        start = self.rate if self.start_rate is None else self.start_rate
        return jnp.maximum(start * (1 - 2 * done), 0.0) + jnp.maximum(self.rate * (2 * done - 1), 0.0)

    def gates(
        self,
        key: jax.Array,
        batch_size: int,
        num_heads: int,
        *,
        step: int | jax.Array | None = None,
        importance: jax.Array | None = None,
        dtype: Any = jnp.float32,
    ) -> jax.Array:
        """Gates (B, H) of `dtype`: 0 for a dropped head, H / kept for the others. Which are dropped does not depend on
        it.

        Raises ValueError when `importance_power` is not zero and `importance` (H,) is missing or of another shape.
        """
        check_integers("DropHead", batch_size=batch_size, num_heads=num_heads)
        key = one_key("DropHead: key", key)
        rate = self.rate_at(step)
        if self.importance_power:
            if importance is None:
                raise ValueError("DropHead: importance_power is not zero, so importance (H,) is needed, got None")
            importance = jnp.asarray(as_array("DropHead: importance", importance), jnp.float32)
            if importance.shape != (num_heads,):
                raise ValueError(f"DropHead: importance must be {(num_heads,)}, got {importance.shape}")
            rate = head_rates(rate, importance, self.importance_power)[None]
        kept = jax.random.uniform(key, (batch_size, num_heads), jnp.float32) >= rate
        kept = kept | ~jnp.any(kept, axis=-1, keepdims=True)
        return kept * (num_heads / jnp.sum(kept, axis=-1, keepdims=True, dtype=dtype))


def head_rates(rate: float | jax.Array, importance: jax.Array, power: float) -> jax.Array:
    """p_h proportional to importance_h ** power with mean `rate`, clipped to [0, 1]; (H,). Importance is floored at a
    millionth of its largest value, so that a head of importance zero has a finite weight."""
    floor = 1e-6 * jnp.max(importance) + jnp.finfo(jnp.float32).tiny
    weight = jnp.exp(power * jnp.log(jnp.maximum(importance, floor)))
    return jnp.clip(rate * weight / jnp.mean(weight), 0.0, 1.0)


def update_importance(importance: jax.Array, gates: jax.Array, gradient: jax.Array, decay: float = 0.99) -> jax.Array:
    """Running I_h = E |gate_h * dL/dgate_h| over the examples that kept head h; (H,).

    `gates` and `gradient`, both (B, H), are the gates of a step and the gradient of the loss with respect to them: for
    a kept head gate * dL/dgate = O_h . dL/dO_h, which is what Michel et al. 2019 average, whatever the rescaling. A
    head dropped in all examples keeps its old score, since a gate of zero did not run and says nothing.

    Raises ValueError for other shapes and a decay outside [0, 1).
    """
    check_rates("update_importance", decay=decay)
    if gates.ndim != 2 or gradient.shape != gates.shape or importance.shape != gates.shape[1:]:
        raise ValueError(
            "update_importance: gates and gradient must be (B, H) and importance (H,), "
            f"got {gates.shape}, {gradient.shape} and {importance.shape}"
        )
    kept = gates != 0
    count = jnp.sum(kept, axis=0)
    seen = jnp.sum(jnp.abs(gates * gradient), axis=0) / jnp.maximum(count, 1)
    return jnp.where(count > 0, decay * importance + (1 - decay) * seen, importance).astype(importance.dtype)
