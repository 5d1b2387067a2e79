"""What the loop asks of a model."""

import inspect
from typing import Any

import jax
from flax import nnx

from mha_kernels import HeadStatistics


class Model(nnx.Module):
    """A model with parameters alone. A new one overrides `__init__` and `__call__`; the rest has a default.

    The constructor names, as keyword parameters, what it needs of `spec` (the task's `TaskSpec`), `vocabulary_size` and
    `length` (the spec's), `attention` (`attention(layer=, rngs=, ...)` makes the attention of a layer, counted from 1),
    `rngs`, and the fields that all models share: `num_layers`, `d_model`, `position`, `norm`, `norm_placement`,
    `mlp_width`, `activation`, `mlp_bias`, `dropout_rate`, `tie_embeddings`, `remat`, `dtype`. Its other keyword
    parameters are fields of `model` in a config.

    The call names, as parameters, what it reads of a batch (`tokens`, ...), and gives outputs that the spec's loss
    compares with the targets. In training it is given those of `key` (for dropout), `step` and `head_gates` that it
    names, as keyword parameters.
    """

    @property
    def inputs(self) -> tuple[str, ...]:
        """What of a batch the call reads."""
        return tuple(name for name in _parameters(self) if name not in ("key", "step", "head_gates"))

    def options(self, **options: Any) -> dict[str, Any]:
        """Those of the training options that the call takes."""
        return {name: value for name, value in options.items() if name in _parameters(self)}

    def forward_flops(self, length: int) -> int:
        """Operations of one example's forward pass, matrix products only, two a multiply-add.

        Every kernel is applied to every token here, and attention as its module counts it (`multiplications`); a model
        of another shape overrides this.
        """
        from mha_research.attention.cost import multiplications

        inside, total = [], 0
        for path, node in nnx.iter_modules(self):
            if hasattr(node, "num_heads") and not any(path[: len(outer)] == outer for outer in inside):
                inside.append(path)
                total += multiplications(node, length, length)
        for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(self, nnx.Param))):
            keys = tuple(part.key for part in path)
            if keys[-1] == "kernel" and not any(keys[: len(outer)] == outer for outer in inside):
                total += length * leaf.size
        return 2 * total

    def head_statistics(self, *inputs: Any, **named: Any) -> list[HeadStatistics]:
        """`HEAD_STATISTICS` of every head, layer by layer. Raises ValueError for a model that does not say."""
        raise ValueError(f"{type(self).__name__} has no head_statistics, which run.head_statistics asks for")


def _parameters(model: Model) -> list[str]:
    return list(inspect.signature(type(model).__call__).parameters)[1:]
