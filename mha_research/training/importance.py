"""Running head importance, which an importance-weighted DropHead reads: measured from the gradient of every update."""

from typing import Any

import jax
import jax.numpy as jnp

from mha_research.attention import update_importance

# Below this, scores are the zeros of a loss that does not depend on the heads.
_TINY = jnp.finfo(jnp.float32).tiny


def open_gates(importance: Any, batch_size: int) -> jax.Array | None:
    """A gate of 1 for every layer, example and head, (N, B, H), to differentiate by; None without importance.

    It multiplies DropHead's own gate, so its gradient is gate * dL/dgate, and exactly 0 for a dropped head.
    """
    scores = jax.tree.leaves(importance)
    return jnp.ones((len(scores), batch_size, scores[0].shape[0]), jnp.float32) if scores else None


def head_sums(gradient: jax.Array | None) -> dict[str, jax.Array]:
    """Sums over examples of |gate * dL/dgate| and of the kept heads, both (N, H), from the gradient (N, B, H)."""
    if gradient is None:
        return {}
    return {"head_scores": jnp.sum(jnp.abs(gradient), 1), "heads_kept": jnp.sum(gradient != 0, 1, dtype=jnp.float32)}


def zero_head_sums(importance: Any) -> dict[str, jax.Array]:
    """What `head_sums` of a batch adds to."""
    gates = open_gates(importance, 1)
    return head_sums(None if gates is None else jnp.zeros_like(gates))


def updated(importance: Any, sums: dict[str, jax.Array]) -> Any:
    """The running importance of every layer (`update_importance`) after the sums of one batch.

    The scores of a layer are divided by their mean, so that only their ratios count and an update early in training,
    where gradients are large, weighs as much as a late one.
    """
    layers, structure = jax.tree.flatten(importance)
    new = []
    for old, score, kept in zip(layers, sums["head_scores"], sums["heads_kept"], strict=True):
        mean = score / jnp.maximum(kept, 1.0)
        relative = mean / jnp.maximum(jnp.sum(mean) / jnp.maximum(jnp.sum(kept > 0), 1), _TINY)
        new.append(update_importance(old, (kept > 0)[None], relative[None]))
    return jax.tree.unflatten(structure, new)
