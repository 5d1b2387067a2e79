"""The public functions: read the arguments, choose an implementation, run it."""

from typing import Any

import jax

from mha_kernels import reference
from mha_kernels.algebra import HeadStatistics, Origin
from mha_kernels.blockwise import Blockwise
from mha_kernels.checks import bundle, check_arrays, statistic_names
from mha_kernels.transforms import run


def attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    mask: Any = None,
    bias: Any = None,
    scale: Any = None,
    softcap: Any = None,
    sink: Any = None,
    head_gate: Any = None,
    dropout: Any = None,
    origin: Origin = Origin(),
    precision: Any = None,
    implementation: Any = "auto",
) -> jax.Array:
    """o = head_gate * sum_j dropout(softmax_j(softcap tanh(scale q.k_j / softcap) + bias)) v_j over the keys mask allows."""
    output, _ = attention_with_statistics(
        query,
        key,
        value,
        mask=mask,
        bias=bias,
        scale=scale,
        softcap=softcap,
        sink=sink,
        head_gate=head_gate,
        dropout=dropout,
        origin=origin,
        precision=precision,
        implementation=implementation,
        statistics=(),
    )
    return output


def attention_with_statistics(
    query: Any,
    key: Any,
    value: Any,
    *,
    mask: Any = None,
    bias: Any = None,
    scale: Any = None,
    softcap: Any = None,
    sink: Any = None,
    head_gate: Any = None,
    dropout: Any = None,
    origin: Origin = Origin(),
    precision: Any = None,
    implementation: Any = "auto",
    statistics: Any = None,
) -> tuple[jax.Array, HeadStatistics]:
    """As `attention`, and `HeadStatistics` computed with it; `statistics` names those wanted, None all."""
    query, key, value = check_arrays(query, key, value)
    algebra = bundle(
        query,
        key,
        mask=mask,
        bias=bias,
        scale=scale,
        softcap=softcap,
        sink=sink,
        head_gate=head_gate,
        dropout=dropout,
        origin=origin,
    )
    names = statistic_names(statistics)
    if implementation == "blockwise" or isinstance(implementation, Blockwise):
        driver = implementation if isinstance(implementation, Blockwise) else Blockwise()
        return run(driver, query, key, value, algebra, names, precision)
    return reference.attend(query, key, value, algebra, names, precision)


def attention_weights(
    query: Any, key: Any, *, mask: Any = None, bias: Any = None, scale: Any = None, softcap: Any = None, sink: Any = None
) -> jax.Array:
    """The probabilities (B, H, Q, K), before gate and dropout: dense, for looking at."""
    query, key = check_arrays(query, key)
    algebra = bundle(query, key, mask=mask, bias=bias, scale=scale, softcap=softcap, sink=sink)
    return reference.weights(query, key, algebra, None)
