"""From a config to its objects: the task, the model, the attention of its blocks, the metrics.

What a constructor is given is what it has parameters for: its own fields, and of the common ones those that it names.
A common field that is changed and that nobody takes is refused, never dropped in silence.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from mha_research.attention import DropHead
from mha_research.config import SCHEMA, ConfigError, default_config, differences
from mha_research.config.attention import COMMON
from mha_research.config.doors import METRICS, Kinds, chosen
from mha_research.config.schema import groups
from mha_research.config.signature import accepts
from mha_research.config.sources import look_up
from mha_research.factory.errors import as_config_error
from mha_research.models import Model
from mha_research.tasks import Task, TaskSpec

SCALES: dict[str, Callable[..., Any]] = {
    "inverse_sqrt": lambda: "inverse_sqrt",
    "inverse": lambda: "inverse",
    "none": lambda: "none",
    "constant": lambda value: value,
}
DROP_HEADS: dict[str, Callable[..., Any]] = {"none": lambda: None, "drop_head": DropHead}
_INITIALIZERS = tuple(f"{name}_init" for name in ("query", "key", "value", "output"))
# Parameters of a model that a field of another name gives: `model.mlp.width` is `mlp_width`.
_MODEL_PARAMETERS = {
    "model.position.name": "position",
    "model.mlp.width": "mlp_width",
    "model.mlp.activation": "activation",
    "model.mlp.use_bias": "mlp_bias",
    **{f"model.{name}": name for name in ("norm", "norm_placement", "dropout_rate", "tie_embeddings", "remat", "dtype")},
    **{f"model.{name}": name for name in ("num_layers", "d_model")},
}


def build_task(config: ConfigDict) -> Task:
    """The task of the config, with its data read. Raises TaskError for bad data, ConfigError for bad settings."""
    make, fields = chosen(SCHEMA, config, "task")
    assert make is not None
    task = as_config_error("task", lambda: make(**fields))
    if not isinstance(task, Task):
        raise ConfigError(f"task.name must name a mha_research.tasks.Task, got a {type(task).__name__}")
    return task


def build_attention(config: ConfigDict, length: int) -> Callable[..., Any]:
    """`make(layer=, rngs=, ...)` for the attention of a layer, counted from 1, that reads `length` tokens in training.

    Raises ConfigError for choices that do not fit.
    """
    make, fields = chosen(SCHEMA, config, "model.attention")
    assert make is not None
    given = {"in_features": config.model.d_model, "length": length, "causal": True, "dtype": config.model.dtype}
    given["dtype"] = jnp.dtype(given["dtype"])
    changed = differences(config, default_config())
    for name, value in _common(config).items():
        if accepts(make, name):
            given[name] = value
        elif any(path == f"model.attention.{name}" or path.startswith(f"model.attention.{name}.") for path in changed):
            raise ConfigError(f"{make.__name__} takes no {name}, but model.attention.{name} is set")
    fields |= {name: value for name, value in given.items() if accepts(make, name)}

    def attention(**more: Any) -> Any:
        return make(**fields, **{name: value for name, value in more.items() if accepts(make, name)})

    return attention


def _common(config: ConfigDict) -> dict[str, Any]:
    """The fields that all kinds of attention share, choices among them built."""
    group, found = config.model.attention, {}
    for name in COMMON:
        if name == "scale" or name == "drop_head":
            found[name] = _choice(f"model.attention.{name}", group[name], SCALES if name == "scale" else DROP_HEADS)
        elif name == "position" or name in _INITIALIZERS:
            found[name] = _built(config, f"model.attention.{name}", bidirectional=False)
        else:
            found[name] = group[name]
    return found


def _built(config: ConfigDict, path: str, **given: Any) -> Any:
    make, fields = chosen(SCHEMA, config, path)
    if make is None:
        return None
    taken = {name: value for name, value in given.items() if accepts(make, name)}
    return as_config_error(path, lambda: make(**taken, **fields))


def _choice(path: str, group: ConfigDict, kinds: dict[str, Callable[..., Any]]) -> Any:
    fields = {name: value for name, value in group.items() if name != "name" and value is not None}
    return as_config_error(path, lambda: kinds[group.name](**fields))


def build_model(config: ConfigDict, spec: TaskSpec, rngs: nnx.Rngs) -> Any:
    """The model of the config for a task of this kind and size. Raises ConfigError for sizes that do not fit."""
    make, fields = chosen(SCHEMA, config, "model")
    if make is None:
        make = _of_spec(spec)
    model = as_config_error("model", lambda: _model(make, fields, config, spec, rngs))
    if not isinstance(model, Model):
        raise ConfigError(f"model.kind must name a mha_research.models.Model, got a {type(model).__name__}")
    return model


def _of_spec(spec: TaskSpec) -> Callable[..., Any]:
    """The model that a task is made for: by its name in the registry, or the class itself."""
    if callable(spec.model):
        return spec.model
    kinds = groups(SCHEMA)["model"].kinds
    assert isinstance(kinds, Kinds)
    if spec.model not in kinds or (make := kinds.make(spec.model)) is None:
        raise ConfigError(f"TaskSpec.model is a class, or one of {', '.join(list(kinds)[1:])}; got {spec.model!r}")
    return make


def _model(
    make: Callable[..., Any], fields: dict[str, Any], config: ConfigDict, spec: TaskSpec, rngs: nnx.Rngs
) -> Any:
    values = {
        "spec": spec,
        "vocabulary_size": spec.vocabulary_size,
        "length": spec.length,
        "attention": build_attention(config, spec.length),
        "rngs": rngs,
    }
    changed = differences(config, default_config())
    unread = [path for path, name in _MODEL_PARAMETERS.items() if path in changed and not accepts(make, name)]
    if not accepts(make, "attention"):
        unread += [path for path in changed if path.startswith("model.attention.")]
    if unread:
        raise ConfigError(f"{make.__name__} has no {', '.join(unread)}")
    for path, name in _MODEL_PARAMETERS.items():
        node: Any = config
        for part in path.split("."):
            node = node[part]
        values[name] = jnp.dtype(node) if name == "dtype" else node
    return make(**fields, **{name: value for name, value in values.items() if accepts(make, name)})


def build_metrics(config: ConfigDict) -> dict[str, Callable[..., Any]]:
    """Name -> function of the metrics that the config lists. Raises ConfigError where two have one name."""
    found: dict[str, Callable[..., Any]] = {}
    for name in config[METRICS] or ():
        function = look_up(name)
        if found.setdefault(function.__name__, function) is not function or function.__name__ in ("loss", "hits", "count"):
            raise ConfigError(f"metrics: there is another metric named {function.__name__!r}")
    return found
