"""One problem that uses every operand at once, for the implementations (`loss`) and for the oracle (`expected`)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mha_kernels as mk
from tests.mha_kernels import oracle

B, Q, K, H, G, E, V = 2, 7, 11, 2, 1, 3, 5
ORIGIN = mk.Origin(batch=3, head=2, query=5, key=1)
# Small enough that most tiles are ragged, and another pair for which none is: the numbers may depend on neither.
BLOCKWISE = mk.Blockwise(query_tile=3, key_tile=5)
IMPLEMENTATIONS = ("reference", BLOCKWISE)
SHAPES = [(Q, K), (B, 1, Q, 1), (1, H, 1, K)]  # of dense biases; every other one is in test_biases.py

# Example 1 has no key at all for its queries of segment 2.
KEEP = np.arange(K)[None] < np.array([[K], [K - 2]])
QUERY_IDS = np.array([[0, 0, 0, 1, 1, 1, 1], [0, 0, 2, 0, 1, 1, 2]])
KEY_IDS = np.array([[0] * 7 + [1] * 4, [0] * 5 + [1] * 6])
OFFSET, LEFT, RIGHT = 1, 6, 4


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def parameters(dtype: Any = np.float64) -> dict[str, Any]:
    """Every differentiable operand; `dtype` is that of query, key and value, all others are float32 or float64."""
    other = np.float64 if dtype == np.float64 else np.float32
    names = {
        "slopes": abs(normal(4, H)) / 4,
        "t5": normal(5, H, 8),
        "clipped": normal(6, 1, 7),
        "distance": normal(7, H, 4),
        "sink": normal(8, H),
        "scale": np.array(0.7),
        "softcap": np.array(2.5),
        "head_gate": np.where(np.arange(B * H).reshape(B, H) == 3, 0, normal(9, B, H)),
    }
    names |= {f"dense{n}": normal(10 + n, *shape) / 4 for n, shape in enumerate(SHAPES)}
    arrays = {"query": normal(1, B, Q, H, E), "key": normal(2, B, K, G, E), "value": normal(3, B, K, G, V)}
    return {name: jnp.asarray(x, dtype) for name, x in arrays.items()} | {
        name: jnp.asarray(x, other) for name, x in names.items()
    }


OF_OUTPUT = normal(40, B, Q, H, V)
OF_STATISTICS = {name: normal(41 + n, B, H, Q) for n, name in enumerate(oracle.DIFFERENTIABLE)}
DROPOUT = mk.Dropout(0.3, np.array([7, 11], np.uint32))


def mask() -> mk.Mask:
    segments = mk.SegmentMask(jnp.asarray(QUERY_IDS), jnp.asarray(KEY_IDS))
    return mk.CausalMask(OFFSET) & mk.WindowMask(LEFT, RIGHT) & mk.KeyPaddingMask(jnp.asarray(KEEP)) & segments


def attend(implementation: Any, p: dict[str, Any]) -> tuple[jax.Array, mk.HeadStatistics]:
    bias = mk.AlibiBias(p["slopes"]) + mk.T5Bias(p["t5"], bidirectional=True, max_distance=6)
    bias = bias + mk.ClippedBias(p["clipped"]) + mk.DistanceBias(p["distance"])
    for n in range(len(SHAPES)):
        bias = bias + mk.DenseBias(p[f"dense{n}"])
    return mk.attention_with_statistics(
        p["query"],
        p["key"],
        p["value"],
        mask=mask(),
        bias=bias,
        dropout=DROPOUT,
        origin=ORIGIN,
        implementation=implementation,
        **{name: p[name] for name in ("scale", "softcap", "sink", "head_gate")},
    )


def loss(implementation: Any, p: dict[str, Any]) -> tuple[jax.Array, Any]:
    """sum(output * OF_OUTPUT) + sum(statistics * OF_STATISTICS) over the heads that ran, and both."""
    output, statistics = attend(implementation, p)
    total = (output.astype(p["sink"].dtype) * OF_OUTPUT.astype(p["sink"].dtype)).sum()
    for name, cotangent in OF_STATISTICS.items():
        row = getattr(statistics, name)
        total += (jnp.where(jnp.isnan(row), 0, row) * cotangent.astype(row.dtype)).sum()
    return total, (output, statistics)


def positions() -> tuple[np.ndarray, np.ndarray]:
    return np.arange(Q)[:, None] + ORIGIN.query, np.arange(K)[None, :] + ORIGIN.key


def indices() -> dict[str, np.ndarray]:
    """Which entry of each table the pair (i, j) reads."""
    i, j = positions()
    return {
        "t5": oracle.t5_bucket(j - i, True, 8, 6),
        "clipped": np.clip(j - i, -3, 3) + 3,
        "distance": np.minimum(abs(j - i), 3),
    }


def expected(p: dict[str, Any], kept: np.ndarray) -> tuple[oracle.Forward, dict[str, np.ndarray]]:
    """Output, statistics and every gradient of `loss` from the oracle; `kept` are the decisions of dropout."""
    p = {name: np.asarray(x, np.float64) for name, x in p.items()}
    i, j = positions()
    bias = -p["slopes"][:, None, None] * abs(i - j)
    for name, index in indices().items():
        bias = bias + p[name][:, index]
    for n in range(len(SHAPES)):
        bias = bias + p[f"dense{n}"]
    allowed = (j <= i + OFFSET) & (j >= i - LEFT) & (j <= i + RIGHT) & KEEP[:, None, None, :]
    allowed = allowed & (QUERY_IDS[:, None, :, None] == KEY_IDS[:, None, None, :])
    options = {name: p[name] for name in ("scale", "softcap", "sink", "head_gate")}
    forward = oracle.attend(
        *(p[name] for name in ("query", "key", "value")),
        allowed=allowed,
        bias=bias,
        kept=kept,
        first_query=ORIGIN.query,
        first_key=ORIGIN.key,
        **options,
    )
    found = oracle.gradients(forward, OF_OUTPUT, OF_STATISTICS)
    of_bias = found.pop("bias")
    found["slopes"] = -(of_bias * abs(i - j)).sum((0, 2, 3))
    for name, index in indices().items():
        entries = [(of_bias * (index == entry)).sum((0, 2, 3)) for entry in range(p[name].shape[1])]
        found[name] = np.stack(entries, -1)
    found["clipped"] = found["clipped"].sum(0, keepdims=True)  # one table for all heads
    for n, shape in enumerate(SHAPES):
        whole = (1,) * (4 - len(shape)) + shape
        shared = tuple(axis for axis in range(4) if whole[axis] == 1)
        found[f"dense{n}"] = of_bias.sum(shared, keepdims=True).reshape(shape)
    return forward, found


def kept(dropout: mk.Dropout, shape: tuple[int, int, int, int], origin: mk.Origin, implementation: Any) -> np.ndarray:
    """What dropout multiplies each probability (B, H, Q, K) by: even weights over unit vectors as values show it."""
    b, h, queries, keys = shape
    values = np.broadcast_to(np.eye(keys, dtype=np.float32)[None, :, None], (b, keys, h, keys))
    zeros = (np.zeros((b, length, h, 1), np.float32) for length in (queries, keys))
    output = mk.attention(*zeros, values, dropout=dropout, origin=origin, implementation=implementation)
    return np.asarray(output.swapaxes(1, 2) > 0) / (1 - dropout.rate)
