"""From a config to its objects: the task, the model, the attention of its blocks."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from mha_research.attention import Alibi, DropHead, RelativeBias, Rotary, initializers
from mha_research.config import ConfigError, build_choice, default_config, differences
from mha_research.config.attention import ATTENTION
from mha_research.factory.kinds import MODULES
from mha_research.models import DecoderLM, SlotRetrieval
from mha_research.tasks import TASKS, RetrievalSpec, Task, TaskSpec

SCALES: dict[str, Callable[..., Any]] = {
    "inverse_sqrt": lambda: "inverse_sqrt",
    "inverse": lambda: "inverse",
    "none": lambda: "none",
    "constant": lambda value: value,
}
POSITIONS: dict[str, Callable[..., Any]] = {
    "none": lambda: None,
    "rotary": Rotary,
    "alibi": Alibi,
    "relative": functools.partial(RelativeBias, bidirectional=False),
}
DROP_HEADS: dict[str, Callable[..., Any]] = {"none": lambda: None, "drop_head": DropHead}
INITIALIZERS: dict[str, Callable[..., Any]] = {
    "xavier_uniform": initializers.xavier_uniform,
    "orthogonal": initializers.orthogonal,
    "svd_decay": initializers.svd_decay,
    "identity": initializers.identity,
}
_CHOICES = {
    "scale": SCALES,
    "position": POSITIONS,
    "drop_head": DROP_HEADS,
    **{f"{name}_init": INITIALIZERS for name in ("query", "key", "value", "output")},
}


def build_task(config: ConfigDict) -> Task:
    """The task of the config, with its data read. Raises TaskError for bad data, ConfigError for bad settings."""
    return as_config_error("task", lambda: build_choice(config.task, TASKS))


def build_attention(config: ConfigDict, length: int) -> Callable[..., Any]:
    """`make(layer=, rngs=)` for the attention of a layer, counted from 1, that reads `length` tokens in training.

    Raises ConfigError for choices that do not fit.
    """
    own = ATTENTION.own()
    fields = {name: x for name, x in config.model.attention.items() if name not in own or x is not None}
    kind = fields.pop("kind")
    if kind == "sigmoid":  # not of each call's keys: a cache has more, and held-out windows may be longer
        fields.setdefault("logit_bias", -math.log(length))
    for name, kinds in _CHOICES.items():
        fields[name] = as_config_error(f"model.attention.{name}", functools.partial(build_choice, fields[name], kinds))
    module = functools.partial(MODULES[kind], config.model.d_model, dtype=jnp.dtype(config.model.dtype), **fields)

    def make(layer: int, **given: Any) -> Any:
        return module(**given, layer=layer) if kind == "differential" else module(**given)

    return make


def build_model(config: ConfigDict, spec: TaskSpec, rngs: nnx.Rngs) -> Any:
    """The model of the config for a task of this kind and size. Raises ConfigError for sizes that do not fit."""
    return as_config_error("model", lambda: MODELS[spec.kind](config, spec, rngs))


def _decoder(config: ConfigDict, spec: TaskSpec, rngs: nnx.Rngs) -> DecoderLM:
    model = config.model
    return DecoderLM(
        spec.vocabulary_size,
        model.num_layers,
        model.d_model,
        build_attention(config, spec.length),
        length=spec.length,
        position=model.position.name,
        norm=model.norm,
        norm_placement=model.norm_placement,
        mlp_width=model.mlp.width,
        activation=model.mlp.activation,
        mlp_bias=model.mlp.use_bias,
        dropout_rate=model.dropout_rate,
        tie_embeddings=model.tie_embeddings,
        remat=model.remat,
        dtype=jnp.dtype(model.dtype),
        rngs=rngs,
    )


def _retrieval(config: ConfigDict, spec: RetrievalSpec, rngs: nnx.Rngs) -> SlotRetrieval:
    """Raises ConfigError where a field is set that this model has no place for: norms, MLP, positions of tokens."""
    model = config.model
    read = ("model.num_layers", "model.d_model", "model.dtype", "model.attention.")
    changed = [path for path in differences(config, default_config()) if path.startswith("model.")]
    if unread := [path for path in changed if not path.startswith(read)]:
        raise ConfigError(f"the model of the retrieval task has no {', '.join(unread)}")
    sizes = {"items": spec.vocabulary_size, "slots": spec.slots, "features": spec.features}
    dtype = jnp.dtype(model.dtype)
    attention = build_attention(config, spec.length)
    return SlotRetrieval(model.num_layers, model.d_model, attention, **sizes, dtype=dtype, rngs=rngs)


MODELS: dict[str, Callable[..., Any]] = {"language_model": _decoder, "retrieval": _retrieval}


def as_config_error(path: str, make: Callable[[], Any]) -> Any:
    """What `make` gives; a setting that a constructor refuses is a ConfigError that names the group."""
    try:
        return make()
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        if type(error).__module__.startswith("mha_research"):  # TaskError says enough by itself
            raise
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
