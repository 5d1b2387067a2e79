"""What is logged of every head while a model trains."""

from typing import Any

import jax

from mha_kernels import HeadStatistics, Mask, attention_with_statistics

HEAD_STATISTICS = ("entropy", "max_probability", "distance", "sink_mass", "previous_mass")  # nats, shares, and tokens


def head_statistics(
    attention: Any, query: jax.Array, key: jax.Array, value: jax.Array, mask: Mask | None = None
) -> HeadStatistics:
    """`HEAD_STATISTICS` of the heads of a `MultiHeadAttention` at each query, (B, H, Q) each.

    Before any dropout, and in memory linear in the length on the tiled path. The inputs are those of the module's call.
    """
    call = attention.scoring(attention.options(query.shape[0], mask=mask))
    call |= {"statistics": HEAD_STATISTICS, "implementation": attention.implementation}
    return attention_with_statistics(*attention.project(query, key, value), **call)[1]
