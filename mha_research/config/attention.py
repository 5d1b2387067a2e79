"""The fields of `model.attention`: the kind of attention, what all kinds share, and what belongs to one of them.

Which of the shared fields a kind cannot take, and why, is in `mha_research/factory/kinds.py`.
"""

from mha_research.config.schema import Choice, Schema, field, optional, optional_sequence

_BASE = optional(float, "wavelength base of rotary and sinusoidal positions (10000)", bounds="(0, inf)")


def _initializer(doc: str) -> Choice:
    return Choice(
        "xavier_uniform",
        {
            "xavier_uniform": {},
            "orthogonal": {},
            "identity": {},
            "svd_decay": {
                "rate": optional(float, "ratio of successive singular values (0.95)"),
                "match_norm": optional(bool, "scale to the Frobenius norm of xavier_uniform (False)"),
            },
        },
        doc,
    )


COMMON: Schema = {
    "num_heads": field(4, "query heads H"),
    "num_kv_heads": optional(int, "key/value heads G, a divisor of num_heads (num_heads)"),
    "head_dim": optional(int, "width E of a query and key head (d_model / num_heads)", bounds="[1, inf)"),
    "value_head_dim": optional(int, "width V of a value head (head_dim)", bounds="[1, inf)"),
    "use_bias": field(False, "biases on the projections"),
    "scale": Choice(
        "inverse_sqrt",
        {
            "inverse_sqrt": {},
            "inverse": {},
            "none": {},
            "constant": {"value": optional(float, "the factor itself")},
        },
        "factor on q.k: 1/sqrt(E), 1/E, 1 or a number",
    ),
    "softcap": optional(float, "scores become softcap * tanh(score / softcap)", bounds="(0, inf)"),
    "normalize_qk": field(False, "normalise queries and keys before the scores"),
    "sink": field(False, "a learned logit per head that joins the softmax"),
    "position": Choice(
        "rotary",
        {
            "none": {},
            "rotary": {"base": _BASE, "interleaved": optional(bool, "pairs are neighbours, as in the paper (False)")},
            "alibi": {"trainable": optional(bool, "learn the slopes (False)")},
            "relative": {
                "kind": optional(str, "T5 buckets, clipped or full distance (t5)", ("t5", "clipped", "distance")),
                "num_buckets": optional(int, "T5 buckets (32)"),
                "max_distance": optional(int, "distance of the last bucket, or of the clip (128)"),
                "shared": optional(bool, "one table for all heads (False)"),
            },
        },
        "positions inside the attention",
    ),
    "query_init": _initializer("initialiser of the query projection"),
    "key_init": _initializer("initialiser of the key projection"),
    "value_init": _initializer("initialiser of the value projection"),
    "output_init": _initializer("initialiser of the output projection"),
    "dropout_rate": field(0.0, "probability that a normalised attention weight is dropped", bounds="[0, 1)"),
    "drop_head": Choice(
        "none",
        {
            "none": {},
            "drop_head": {
                "rate": optional(float, "probability that a head is dropped, at the end of the schedule"),
                "schedule": optional(str, "of the rate (constant)", ("constant", "linear", "v_shaped")),
                "steps": optional(int, "length of the schedule, required by all but constant"),
                "start_rate": optional(float, "rate at the start (linear 0, v_shaped rate)"),
                "importance_power": optional(
                    float, "above 0 heads that matter are dropped more often, below 0 less often (0: all alike)"
                ),
            },
        },
        "dropping of whole heads",
    ),
    "packed": field(False, "query, key and value in one matrix product; starts and trains alike"),
    "adapter_features": optional(int, "width of a bottleneck adapter on the output", bounds="[1, inf)"),
    "gate_output": field(False, "a sigmoid gate on each head's output"),
    "add_bias_kv": field(False, "a learned key and value appended to the sequence"),
    "add_zero_attention": field(False, "a zero key and value appended to the sequence"),
    "implementation": field("auto", "implementation of the attention: auto, reference, blockwise, ..."),
}

KINDS = {
    "multi_head": {},
    "talking_heads": {},
    "sigmoid": {"logit_bias": optional(float, "added to the scores before the sigmoid (-log of the task's length)")},
    "shaw": {
        "max_distance": optional(int, "offsets beyond it share a row of the tables (16)", bounds="[1, inf)"),
        "key_table": optional(bool, "relative positions in the keys (True)"),
        "value_table": optional(bool, "relative positions in the values (True)"),
    },
    "differential": {},
    "collaborative": {
        "shared_dim": optional(int, "width S that all heads share in query and key (d_model)", bounds="[1, inf)")
    },
    "performer": {
        "num_features": optional(int, "random features m (256)", bounds="[1, inf)"),
        "feature_kind": optional(str, "of the random features (positive)", ("positive", "hyperbolic", "trigonometric")),
        "orthogonal": optional(bool, "random directions orthogonal in blocks of the head width (True)"),
        "redraw_every": optional(
            int, "updates after which features are drawn anew; evaluations use the first (never)", bounds="[1, inf)"
        ),
    },
    "conv_value": {"kernel_size": optional(int, "tokens up to its own that make a value (3)", bounds="[1, inf)")},
    "frame_difference": {
        "difference": optional(
            str, "the change since the token before joins it or replaces it (concatenate)", ("concatenate", "replace")
        )
    },
    "multi_scale": {
        "patch_sizes": optional_sequence(
            int, "tokens of a patch, for each group of num_heads heads (1, 2, 4)", bounds="[1, inf)"
        )
    },
}

ATTENTION = Choice("multi_head", KINDS, "the attention module", selector="kind", common=COMMON)
