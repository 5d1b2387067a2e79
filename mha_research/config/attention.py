"""The fields of `model.attention` that all kinds share; those of one kind stand in its own file.

Which of the shared fields a kind cannot take, and why, it says itself (`allowed`, see `mha_research/attention/kind.py`).
"""

from mha_research.config.doors import door
from mha_research.config.schema import Choice, Schema, field, optional

def _initializer(doc: str) -> Choice:
    return door("xavier_uniform", "mha_research.attention.registry:INITIALIZERS", doc, given=())


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
    "position": door(
        "rotary",
        "mha_research.attention.registry:POSITIONS",
        "positions inside the attention",
        given=("bidirectional",),
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
    "output_projection": field(True, "the matrix W_O after the heads; without it they are the output, side by side"),
    "packed": field(False, "query, key and value in one matrix product; starts and trains alike"),
    "adapter_features": optional(int, "width of a bottleneck adapter on the output", bounds="[1, inf)"),
    "gate_output": field(False, "a sigmoid gate on each head's output"),
    "add_bias_kv": field(False, "a learned key and value appended to the sequence"),
    "add_zero_attention": field(False, "a zero key and value appended to the sequence"),
    "implementation": field("auto", "implementation of the attention: auto, reference, blockwise, ..."),
}

# What the factory passes to a module, and what has no place in a config.
_GIVEN = (
    *("in_features", "key_features", "value_features", "layer", "length", "causal"),
    *("dtype", "param_dtype", "precision", "rngs"),
    *("out_features", "joint_init", "grid"),
)

ATTENTION = door(
    "multi_head", "mha_research.attention.registry:KINDS", "the attention module", _GIVEN, "kind", COMMON
)
