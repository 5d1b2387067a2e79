"""The attention algebra and its gradients in float64 NumPy: dense, closed form, and sharing no line with mha_kernels.

A score is s = softcap * tanh(scale * q.k / softcap) + bias where `allowed`, and the caller writes `allowed` and `bias`
out as dense (B, H, Q, K) arrays. `kept` is what dropout multiplies a probability by: 0 or 1 / (1 - rate).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

MEANS = ("distance", "sink_mass", "diagonal_mass", "previous_mass")
DIFFERENTIABLE = ("lse", "entropy", *MEANS)


@dataclass
class Forward:
    """Output (B, Q, H, V), statistics (B, H, Q), probabilities (B, H, Q, K), and what the backward pass needs."""

    output: np.ndarray
    statistics: dict[str, np.ndarray]
    p: np.ndarray
    inner: dict[str, Any]


def moments(queries: int, keys: int, first_query: int = 0, first_key: int = 0) -> dict[str, np.ndarray]:
    """What each statistic in MEANS averages over the keys, (Q, K)."""
    i, j = np.arange(queries)[:, None] + first_query, np.arange(keys)[None, :] + first_key
    return {
        "distance": abs(i - j).astype(float),
        "sink_mass": (j == 0) + 0.0 * i,
        "diagonal_mass": (i == j).astype(float),
        "previous_mass": (j == i - 1).astype(float),
    }


def attend(
    query: Any,
    key: Any,
    value: Any,
    *,
    allowed: Any = True,
    bias: Any = 0.0,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Any = None,
    head_gate: Any = None,
    kept: Any = 1.0,
    first_query: int = 0,
    first_key: int = 0,
) -> Forward:
    """Everything that `attention_with_statistics` returns."""
    q, k, v = (np.asarray(x, np.float64) for x in (query, key, value))
    (b, queries, h, e), (_, keys, g, _) = q.shape, k.shape
    shape = (b, h, queries, keys)
    k, v = np.repeat(k, h // g, axis=2), np.repeat(v, h // g, axis=2)
    scale = e**-0.5 if scale is None else float(scale)
    dot = np.einsum("bihe,bjhe->bhij", q, k)
    scores = scale * dot
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    scores = np.where(allowed, scores + np.asarray(bias, np.float64), -np.inf)
    scores = np.broadcast_to(scores, shape)
    sinks = np.full((1, h, 1), -np.inf) if sink is None else np.asarray(sink, np.float64).reshape(1, h, 1)
    top = np.maximum(scores.max(-1), sinks)
    shift = np.where(top == -np.inf, 0, top)
    total = np.exp(scores - shift[..., None]).sum(-1) + np.exp(sinks - shift)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + shift
    p = np.exp(scores - np.where(lse == -np.inf, 0, lse)[..., None])
    p_sink = np.exp(sinks - np.where(lse == -np.inf, 0, lse))
    gate = np.ones((b, h)) if head_gate is None else np.broadcast_to(np.asarray(head_gate, np.float64), (b, h))
    logs = np.log(np.where(p > 0, p, 1))
    statistics = {
        "lse": lse,
        "entropy": -(p * logs).sum(-1),
        "max_probability": p.max(-1),
        "max_logit": scores.max(-1),
    }
    weigh = moments(queries, keys, first_query, first_key)
    statistics |= {name: (p * weigh[name]).sum(-1) for name in MEANS}
    closed = (gate == 0)[:, :, None]
    statistics = {name: np.where(closed, np.nan, row) for name, row in statistics.items()}
    raw = np.einsum("bhij,bjhv->bihv", p * kept, v)
    inner = dict(q=q, k=k, v=v, g=g, dot=dot, scale=scale, softcap=softcap, gate=gate, gate_rank=np.ndim(head_gate))
    inner |= dict(raw=raw, p_sink=p_sink, kept=kept, logs=logs, weigh=weigh)
    return Forward(raw * gate[:, None, :, None], statistics, p, inner)


def gradients(forward: Forward, of_output: Any, of_statistics: dict[str, Any]) -> dict[str, np.ndarray]:
    """Gradients of sum(output * of_output) + sum_n sum(statistics[n] * of_statistics[n]) by operand.

    "bias" is the gradient of the dense (B, H, Q, K) bias. A closed head passes none, not even to its own gate.
    """
    f, p = forward.inner, forward.p
    of_output = np.asarray(of_output, np.float64)
    is_open = (f["gate"] != 0)[:, :, None].astype(float)
    gated = of_output * f["gate"][:, None, :, None]
    of_v = np.einsum("bhij,bihv->bjhv", p * f["kept"], gated)
    of_p = np.einsum("bihv,bjhv->bhij", gated, f["v"]) * f["kept"]
    rows = {name: np.asarray(row, np.float64) * is_open for name, row in of_statistics.items()}
    for name, row in rows.items():
        if name in MEANS:
            of_p = of_p + row[..., None] * f["weigh"][name]
    if "entropy" in rows:
        of_p = of_p - rows["entropy"][..., None] * (f["logs"] + 1) * (p > 0)
    of_lse = rows.get("lse", np.zeros(p.shape[:3])) - (p * of_p).sum(-1)
    ds = p * (of_p + of_lse[..., None])
    scaled = f["scale"] * f["dot"]
    of_softcap, of_scaled = 0.0, ds
    if f["softcap"] is not None:
        ratio = scaled / f["softcap"]
        of_scaled = ds * (1 - np.tanh(ratio) ** 2)
        of_softcap = (ds * np.tanh(ratio) - of_scaled * ratio).sum()
    of_dot = f["scale"] * of_scaled

    def by_group(rows: np.ndarray) -> np.ndarray:
        return rows.reshape(*rows.shape[:2], f["g"], -1, rows.shape[-1]).sum(3)

    of_gate = np.where(f["gate"] != 0, (of_output * f["raw"]).sum((1, 3)), 0)
    return {
        "query": np.einsum("bhij,bjhe->bihe", of_dot, f["k"]),
        "key": by_group(np.einsum("bhij,bihe->bjhe", of_dot, f["q"])),
        "value": by_group(of_v),
        "bias": ds,
        "scale": (of_scaled * f["dot"]).sum(),
        "softcap": of_softcap,
        "sink": (f["p_sink"] * of_lse).sum((0, 2)),
        "head_gate": of_gate if f["gate_rank"] == 2 else of_gate.sum(0),
    }


def t5_bucket(relative_position: np.ndarray, bidirectional: bool, buckets: int, max_distance: int) -> np.ndarray:
    """Raffel et al. 2020 as their released code computes it: the logarithm in float32, truncated."""
    bucket, n = np.zeros(relative_position.shape, np.int64), -relative_position
    if bidirectional:
        buckets //= 2
        bucket += (n < 0) * buckets
        n = abs(n)
    n = np.maximum(n, 0)
    exact = buckets // 2
    fraction = np.log(n.astype(np.float32) / exact + np.finfo(np.float32).eps) / np.log(max_distance / exact)
    large = exact + (fraction.astype(np.float32) * (buckets - exact)).astype(np.int64)
    return bucket + np.where(n < exact, n, np.minimum(large, buckets - 1))
