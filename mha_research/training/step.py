"""The compiled functions of a run: initial state, one update, one batch of evaluation. Plain pytrees in and out."""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx, traverse_util
from ml_collections import ConfigDict

from mha_research.attention import HeadImportance
from mha_research.attention.variants.performer import RandomFeatures
from mha_research.config import ConfigError, changed, default_config, flat, from_json, named_outside
from mha_research.config.sources import fingerprints
from mha_research.factory.build import build_metrics, build_model
from mha_research.factory.optimizer import build_optimizer, build_schedule
from mha_research.models.heads import HEAD_STATISTICS
from mha_research.tasks import TaskSpec
from mha_research.training.importance import head_sums, open_gates, updated, zero_head_sums

Batch = dict[str, Any]
State = dict[str, Any]
Sums = dict[str, jax.Array]


def token_values(logits: jax.Array, targets: jax.Array, mask: jax.Array) -> Sums:
    """-log softmax(logits)[target] (nats), hits, and ones, (B, L) float32: zero where the mask is false.

    logits (B, L, vocabulary), targets and mask (B, L). What stands at masked tokens, NaN included, has no part in them.
    """
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)
    hits = jnp.argmax(logits, axis=-1) == targets
    return {
        "loss": jnp.where(mask, losses, 0.0),
        "hits": (mask & hits).astype(jnp.float32),
        "count": mask.astype(jnp.float32),
    }


def square_values(outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> Sums:
    """As `token_values` for numbers: the mean square of the error, and as hits the errors below 0.05.

    outputs and targets (B, L, features), mask (B, L).
    """
    error = jnp.mean(jnp.square(outputs.astype(jnp.float32) - targets), axis=-1)
    return {
        "loss": jnp.where(mask, error, 0.0),
        "hits": (mask & (error < 0.05)).astype(jnp.float32),
        "count": mask.astype(jnp.float32),
    }


def loss_values(loss: Callable[..., jax.Array], outputs: Any, targets: jax.Array, mask: jax.Array) -> Sums:
    """As `token_values` for a loss (outputs, targets) -> (B, L) of the task's own, which knows no hits."""
    losses = loss(outputs, targets)
    if losses.shape != mask.shape:
        raise ValueError(f"TaskSpec.loss gives one number for each of the mask's {mask.shape}, got {losses.shape}")
    return {
        "loss": jnp.where(mask, losses.astype(jnp.float32), 0.0),
        "hits": jnp.zeros(mask.shape, jnp.float32),
        "count": mask.astype(jnp.float32),
    }


# Loss of a task -> (outputs, targets, mask) -> what is summed of every target.
VALUES: dict[str, Callable[..., Sums]] = {"cross_entropy": token_values, "squared_error": square_values}


def values_of(loss: str | Callable[..., jax.Array]) -> Callable[..., Sums]:
    """What is summed of every target. Raises ConfigError for a name that is no loss."""
    if callable(loss):
        return functools.partial(loss_values, loss)
    if loss not in VALUES:
        raise ConfigError(f"TaskSpec.loss is a function, or one of {', '.join(VALUES)}; got {loss!r}")
    return VALUES[loss]


def zero_sums(shape: tuple[int, ...] = (), names: Collection[str] = ("loss", "hits", "count")) -> Sums:
    return {name: jnp.zeros(shape, jnp.float32) for name in names}


def accumulate(loss_and_grad: Any, params: Any, batch: Batch, parts: int, zero: Sums | None = None) -> tuple[Sums, Any]:
    """Sums and the gradient of the mean loss over the batch, which is computed in `parts` one after the other.

    Every part is divided by the number of real tokens in the *whole* batch, so parts with few of them weigh little and
    the result is that of the undivided batch. `loss_and_grad(params, part, index, total)` gives ((_, sums), gradient);
    `zero` is what the sums start from (`zero_sums`).
    """
    total = jnp.maximum(jnp.sum(batch["mask"], dtype=jnp.float32), 1.0)
    if parts == 1:
        (_, sums), gradient = loss_and_grad(params, batch, 0, total)
        return sums, gradient
    # Strided, so that a batch spread over devices stays spread within every part.
    split = jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch)

    def add(carry: tuple[Sums, Any], indexed: tuple[jax.Array, Batch]) -> tuple[tuple[Sums, Any], None]:
        index, part = indexed
        (_, sums), gradient = loss_and_grad(params, part, index, total)
        return jax.tree.map(jnp.add, carry, (sums, gradient)), None

    start = (zero_sums() if zero is None else zero, jax.tree.map(jnp.zeros_like, params))
    return jax.lax.scan(add, start, (jnp.arange(parts), split))[0]


@dataclasses.dataclass(frozen=True)
class Program:
    """The compiled functions for one config and task.

    The state is a dict: `params` (with a Performer's random features, which no update changes), `optimizer`, `step`
    (updates tried), `key`, `skipped` and `skipped_in_a_row` (updates not made for a non-finite gradient), `sums` (of
    the training metrics since the last log row), and `importance` of the heads where an importance-weighted DropHead
    asks for it.
    """

    init: Any  # seed -> state
    update: Any  # (state, batch) -> (state, metrics); the state that goes in is given up
    evaluate: Any  # (params, sums, batch) -> sums, (documents,) each
    head_statistics: Any  # (params, batch) -> {name: (layers, H)}, means over the real tokens
    graphdef: Any
    importance: Any  # of every head at the start; nothing but DropHead in training reads it
    parameters: int
    forward_flops: int
    metrics: tuple[str, ...] = ()  # names of the functions that the config lists

    def held_out_zero(self, documents: int) -> Sums:
        """What the sums of an evaluation start from."""
        return zero_sums((documents,), ("loss", "hits", "count", *self.metrics))

    def model(self, params: Any) -> Any:
        """The module with these parameters."""
        return nnx.merge(self.graphdef, params, self.importance)


def build_program(config: ConfigDict, spec: TaskSpec) -> Program:
    """The program of a config: one object for all that differ only in what does not enter it (seed, data, run)."""
    default = flat(default_config())
    same = {path: value for path, value in default.items() if path.startswith(("seed", "task.", "run."))}
    config = changed(flat(config), same)
    return _build_program(json.dumps(config.to_dict()), fingerprints(named_outside(config)), spec)


@functools.lru_cache(maxsize=8)
def _build_program(config_json: str, code: tuple[str, ...], spec: TaskSpec) -> Program:
    """`code` are the hashes of what comes from outside: with another text it is another program."""
    config = from_json(config_json)
    abstract = nnx.eval_shape(lambda: build_model(config, spec, nnx.Rngs(0)))
    graphdef, params, features, importance = _split(abstract)
    importance = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), importance)
    optimizer, schedule = build_optimizer(config), build_schedule(config)
    untrained = frozenset(traverse_util.flatten_dict(features))
    metrics = build_metrics(config)
    functions = _Functions(config, spec, optimizer, schedule, graphdef, importance, untrained, metrics)
    return Program(
        init=jax.jit(functions.init),
        update=jax.jit(functions.update, donate_argnums=0),
        evaluate=jax.jit(functions.evaluate),
        head_statistics=jax.jit(functions.head_statistics),
        graphdef=graphdef,
        importance=importance,
        parameters=sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)),
        forward_flops=abstract.forward_flops(spec.length),
        metrics=tuple(metrics),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Functions:
    """The functions of a `Program` before they are compiled."""

    config: ConfigDict
    spec: TaskSpec
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    graphdef: Any
    importance: Any
    untrained: frozenset[tuple[Any, ...]]  # paths of random features among the parameters
    metrics: Mapping[str, Callable[..., jax.Array]]

    def init(self, seed: jax.Array) -> State:
        params_key, key = jax.random.split(jax.random.key(seed))
        _, params, features, _ = _split(build_model(self.config, self.spec, nnx.Rngs(params_key)))
        zero = jnp.zeros((), jnp.int32)
        own = {"importance": self.importance} if self.importance else {}
        return own | {
            "params": _joined(params, features),
            "optimizer": self.optimizer.init(params),
            "step": zero,
            "key": key,
            "skipped": zero,
            "skipped_in_a_row": zero,
            "sums": zero_sums() | {"grad_norm": jnp.zeros(()), "updates": jnp.zeros(())},
        }

    def parted(self, params: Any) -> tuple[Any, Any]:
        """(what is trained, random features), each a tree of its own."""
        if not self.untrained:
            return params, {}
        flat = traverse_util.flatten_dict(params)
        features = {path: flat.pop(path) for path in self.untrained}
        return traverse_util.unflatten_dict(flat), traverse_util.unflatten_dict(features)

    def outputs(self, params: Any, importance: Any, batch: Batch, **options: Any) -> Any:
        """What the model makes of a batch."""
        model = nnx.merge(self.graphdef, params, importance)
        return model(**_inputs(model, batch), **model.options(**options))

    def values(self, outputs: Any, batch: Batch) -> Sums:
        """What is summed of every target, (B, L) each."""
        return values_of(self.spec.loss)(outputs, batch["targets"], batch["mask"])

    def gradient(self, state: State, batch: Batch) -> tuple[Sums, Any]:
        """Sums over the batch, those of the heads' importance among them, and the gradient of the mean loss."""
        key, scores = jax.random.fold_in(state["key"], state["step"]), state.get("importance", {})
        trained, features = self.parted(state["params"])

        def loss(params: Any, gates: Any, part: Batch, index: jax.Array, total: jax.Array) -> tuple[jax.Array, Sums]:
            options = {"key": jax.random.fold_in(key, index), "step": state["step"], "head_gates": gates}
            outputs = self.outputs(_joined(params, features), scores, part, **options)
            sums = jax.tree.map(jnp.sum, self.values(outputs, part))
            return sums["loss"] / total, sums

        def loss_and_grad(params: Any, part: Batch, index: jax.Array, total: jax.Array) -> Any:
            gates = open_gates(scores, len(part["mask"]))
            derive = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
            (value, sums), (gradient, of_gates) = derive(params, gates, part, index, total)
            return (value, sums | head_sums(of_gates)), gradient

        zero = zero_sums() | zero_head_sums(scores)
        return accumulate(loss_and_grad, trained, batch, self.config.train.accumulate, zero)

    def update(self, state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        sums, gradient = self.gradient(state, batch)
        grad_norm = optax.tree.norm(gradient)
        finite = jnp.isfinite(grad_norm) & jnp.isfinite(sums["loss"])
        trained, features = self.parted(state["params"])
        changes, new_optimizer = self.optimizer.update(gradient, state["optimizer"], trained)
        new = {"params": _joined(optax.apply_updates(trained, changes), features), "optimizer": new_optimizer}
        if "importance" in state:
            new["importance"] = updated(state["importance"], sums)
        new = jax.tree.map(functools.partial(jnp.where, finite), new, {name: state[name] for name in new})
        sums = {name: sums[name] for name in zero_sums()} | {"grad_norm": grad_norm, "updates": jnp.ones(())}
        new |= {"step": state["step"] + 1, "key": state["key"], **self.counted(state, sums, finite)}
        metrics = {name: new[name] for name in ("sums", "skipped", "skipped_in_a_row")}
        rate = jnp.asarray(self.schedule(state["step"] - state["skipped"]), jnp.float32)
        # Copies: the state itself is given up to the next update before these are read.
        return new, jax.tree.map(jnp.copy, metrics) | {"learning_rate": rate}

    def counted(self, state: State, sums: Sums, finite: jax.Array) -> State:
        """What is skipped and summed after an update.

        The sums begin anew after each log row: being part of the state, a resumed run logs what the uninterrupted one
        does.
        """
        begin = state["step"] % self.config.train.log_every == 0
        kept = jax.tree.map(lambda old: jnp.where(begin, 0.0, old), state["sums"])
        return {
            "skipped": state["skipped"] + ~finite,
            "skipped_in_a_row": jnp.where(finite, 0, state["skipped_in_a_row"] + 1),
            "sums": jax.tree.map(lambda old, now: old + jnp.where(finite, now, 0.0), kept, sums),
        }

    def evaluate(self, params: Any, sums: Sums, batch: Batch) -> Sums:
        outputs = self.outputs(params, self.importance, batch)
        values = self.values(outputs, batch) | {
            name: jnp.where(batch["mask"], metric(outputs, batch), 0.0) for name, metric in self.metrics.items()
        }
        document = batch.get("document", jnp.zeros(batch["mask"].shape, jnp.int32))
        return {name: sums[name].at[document].add(value) for name, value in values.items()}

    def head_statistics(self, params: Any, batch: Batch) -> dict[str, jax.Array]:
        model = nnx.merge(self.graphdef, params, self.importance)
        layers = model.head_statistics(**_inputs(model, batch))
        weight = (batch["mask"] / jnp.maximum(jnp.sum(batch["mask"]), 1))[:, None, :]
        return {
            name: jnp.stack([jnp.sum(getattr(layer, name) * weight, (0, 2)) for layer in layers])
            for name in HEAD_STATISTICS
        }


def _inputs(model: Any, batch: Batch) -> Batch:
    """What of the batch the model reads."""
    return {name: batch[name] for name in model.inputs if name in batch}


def _joined(params: Any, features: Any) -> Any:
    """Parameters and random features as one tree."""
    if not features:
        return params
    return traverse_util.unflatten_dict(traverse_util.flatten_dict(params) | traverse_util.flatten_dict(features))


def _split(model: nnx.Module) -> tuple[Any, Any, Any, Any]:
    """Graph definition, and parameters, random features and head importance as plain dicts. A model that keeps other
    state is refused."""
    graphdef, *states = nnx.split(model, nnx.Param, RandomFeatures, HeadImportance, ...)
    params, features, importance, rest = map(nnx.to_pure_dict, states)
    if jax.tree.leaves(rest):
        raise ConfigError(f"model: only parameters may be kept in a model, got {list(rest)}")
    return graphdef, params, features, importance
