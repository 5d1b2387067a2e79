"""The one documented default: every field of an experiment, with its type and its meaning.

A choice is a group `{name, ...the fields of every kind}`. Its optional fields are None until set, which means that the
default of the kind holds. A field that belongs to another kind than the chosen one may not be set. A door is a choice
whose kinds are classes, which declare their fields themselves; a name from outside may stand there too.
"""

import functools
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from mha_research.config.attention import ATTENTION
from mha_research.config.doors import METRICS, door, enter, outside_fields, use_in
from mha_research.config.schema import Choice, Field, Schema, field, flatten, optional, optional_sequence

TASK = door("char_lm", "mha_research.tasks.registry:TASKS", "what is learned", given=())

# What the factory passes to a model, of what it asks for: from the task's spec, and from the fields below.
_MODEL_GIVEN = (
    *("spec", "vocabulary_size", "length", "attention", "mlp_width", "mlp_bias", "rngs"),
    *("num_layers", "d_model", "position", "norm", "norm_placement", "activation", "dropout_rate"),
    *("tie_embeddings", "remat", "dtype"),
)

MODEL = door(
    "auto",
    "mha_research.models.registry:MODELS",
    "the model; auto: the one that the task is made for",
    _MODEL_GIVEN,
    "kind",
    {
        "num_layers": field(2, "blocks", bounds="[1, inf)"),
        "d_model": field(128, "width D of the residual stream", bounds="[1, inf)"),
        "attention": ATTENTION,
        "position": Choice("none", {"none": {}, "sinusoidal": {}, "learned": {}}, "positions added to the embeddings"),
        "norm": field("rms_norm", "kind of the norms", ("rms_norm", "layer_norm")),
        "norm_placement": field("pre", "norm before each branch, or after its residual sum", ("pre", "post")),
        "mlp": {
            "width": optional(int, "hidden width (4 d_model)", bounds="[1, inf)"),
            "activation": field(
                "gelu", "of the hidden layer; swiglu gates it with a third matrix", ("gelu", "relu", "swiglu")
            ),
            "use_bias": field(False, "biases in the MLP"),
        },
        "dropout_rate": field(0.0, "dropout on the embeddings and on each branch", bounds="[0, 1)"),
        "tie_embeddings": field(True, "the output matrix is the embedding"),
        "remat": field(False, "recompute the blocks in the backward pass to save memory"),
        "dtype": field(
            "float32",
            "of the computation; parameters, softmax and loss stay float32",
            ("float32", "bfloat16", "float16"),
        ),
    },
)

SCHEMA: Schema = {
    "seed": field(0, "of the parameters, the order of the data and the dropout", bounds="[0, inf)"),
    "task": TASK,
    "model": MODEL,
    "optimizer": {
        "learning_rate": field(1e-3, "peak rate", bounds="[0, inf)"),
        "rule": door("adamw", "mha_research.factory.registry:RULES", "update rule", given=("learning_rate", "mask")),
        "schedule": door(
            "cosine",
            "mha_research.factory.registry:SCHEDULES",
            "of the rate after the warm-up",
            given=("learning_rate", "warmup_steps", "decay_steps"),
        ),
        "warmup_steps": field(100, "updates over which the rate rises linearly from 0", bounds="[0, inf)"),
        "clip_norm": optional(float, "largest global norm of the gradient", bounds="[0, inf)"),
    },
    METRICS: optional_sequence(str, "functions FILE.py:NAME(outputs, batch) -> (B, L) whose means on held-out data are logged"),
    "train": {
        "steps": field(1000, "updates", bounds="[1, inf)"),
        "batch_size": field(32, "examples of one update", bounds="[1, inf)"),
        "accumulate": field(
            1, "parts into which an update's batch is split to save memory; divides batch_size", bounds="[1, inf)"
        ),
        "log_every": field(20, "steps between rows of training metrics", bounds="[1, inf)"),
        "eval_every": field(250, "steps between validations; the last step always has one", bounds="[1, inf)"),
        "eval_batch_size": optional(int, "examples of an evaluation batch (batch_size)", bounds="[1, inf)"),
        "eval_limit": optional(
            int, "examples of each held-out set that are scored, evenly spaced (all)", bounds="[1, inf)"
        ),
        "checkpoint_every": field(250, "steps between checkpoints; the last step always has one", bounds="[1, inf)"),
        "keep_last": field(
            2, "newest checkpoints that are kept, beside the best by validation loss", bounds="[1, inf)"
        ),
        "max_skipped": field(
            20, "updates in a row with non-finite gradients after which the run is called diverged", bounds="[1, inf)"
        ),
    },
    # How a run is carried out. Nothing here changes a number, so a run may be resumed with other values.
    "run": {
        "data_workers": field(0, "processes that make batches; 0: threads of this one", bounds="[0, inf)"),
        "tensorboard": field(True, "write TensorBoard events beside metrics.jsonl"),
        "baselines": field(True, "measure simple predictors on the held-out sets at the end"),
        "head_statistics": field(False, "log at each validation what every head does on its first batch"),
        "profile_steps": field(
            0, "steps that jax.profiler traces into the workdir, after the tenth; 0: none", bounds="[0, inf)"
        ),
        "sample_length": field(0, "characters to generate at the end; 0: none", bounds="[0, inf)"),
        "sample_prompt": field("", "beginning of the generated sample"),
        "sample_temperature": field(0.8, "divides the logits of the sample", bounds="[0, inf)"),
    },
}


@functools.cache
def builtin_fields() -> Mapping[str, Field]:
    """Every field of a config that names nothing from outside, by its dotted path."""
    return flatten(SCHEMA)


def known_fields(values: Mapping[str, Any]) -> dict[str, Field]:
    """Every field of a config with these flat values: the built-in ones, and those of the kinds from outside."""
    return {**builtin_fields(), **outside_fields(SCHEMA, values)}


def default_config() -> ConfigDict:
    """A fresh, locked, typed config with every field at its default. Config files change it and return it."""
    config = ConfigDict()
    for path, field in builtin_fields().items():
        group = config
        *parents, name = path.split(".")
        for parent in parents:
            if parent not in group:
                group[parent] = ConfigDict()
            group = group[parent]
        enter(group, {name: field})
    return config.lock()


def use(group: ConfigDict, name: str, **fields: Any) -> None:
    """Choose a kind in a group of a config: sets its name, and adds the fields that a kind from outside has.

    Args:
        group: `config.task`, `config.model`, `config.model.attention`, its `position` or one of its four initializers,
            `config.optimizer.rule` or `config.optimizer.schedule`.
        name: `file.py:Name`, found beside the config file or in the working directory; `package.module:Name`; or the
            name of a built-in kind.
        **fields: values of the kind's own fields, which are the keyword parameters of its constructor.

    Raises:
        ConfigError: for a group or a name that is none, code that does not run, a field that is unknown or of another
            type.
    """
    use_in(SCHEMA, group, name, fields)
