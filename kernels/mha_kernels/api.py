"""The public functions: read the arguments, choose an implementation, run it."""

from typing import Any

import jax

from mha_kernels import dispatch, reference
from mha_kernels.algebra.spec import HeadStatistics, Origin
from mha_kernels.arguments import build_spec, check_arrays, statistic_names
from mha_kernels.blockwise import gram

HERE = Origin()


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
    origin: Origin = HERE,
    precision: Any = None,
    implementation: Any = "auto",
) -> jax.Array:
    """Multi-head attention, (B, Q, H, V) in the type of `query`.

        s = scale * q_i . k_j                  scale defaults to 1 / sqrt(E)
        s = softcap * tanh(s / softcap)
        s = s + bias(b, h, i, j)               never multiplied by scale
        p = softmax over the keys that mask allows (and the sink, if there is one)
        o = head_gate[b, h] * sum_j dropout(p_j) v_j

    Args:
        query: (B, Q, H, E), float16, bfloat16, float32 or float64; scores, softmax and sums are at least float32.
        key: (B, K, G, E). H is a multiple of G; query head h uses key/value head h // (H / G).
        value: (B, K, G, V).
        mask: a `Mask`, or a boolean array, True = may attend, of rank 2 (Q, K) or 4 (B|1, H|1, Q|1, K|1).
        bias: a `Bias`, or a float array of rank 2 or 4 as for mask; -inf forbids a key.
        scale: a number or scalar.
        softcap: a positive number or scalar; None for no cap.
        sink: (H,) logits that join the softmax, neither scaled, capped nor biased.
        head_gate: (H,) or (B, H). A head whose gate is zero does no work, forward or backward; the gradient with
            respect to that zero is zero by definition, since the head did not run.
        dropout: `Dropout(rate, key)`, applied to the normalised probabilities.
        origin: where these arrays lie in a larger whole; see `Origin`.
        precision: of the matrix products, as in `jax.lax.dot_general`.
        implementation: "auto", "reference", "blockwise", "native", "pallas_tpu", "pallas_gpu", "xla", "cudnn", or an
            object with tile sizes, e.g. `Blockwise(query_tile=512, key_tile=256)`. "reference" has every transform;
            the others have grad, vmap, and ("blockwise") jvp of grad.

    Returns:
        (B, Q, H, V), of the dtype of `query`. A query that no key allows gives zeros and passes no gradient. What lies
        at keys that no query may attend, NaN included, reaches no output and no gradient.

    Raises:
        ValueError: a shape, size, value or name does not fit, or the named implementation cannot do the job (and why).
        TypeError: a type does not fit, e.g. an integer mask.

    Source: Vaswani et al. 2017, "Attention is all you need", section 3.2; the layout is that of
    `jax.nn.dot_product_attention`.
    """
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
    precision: Any = None,
    implementation: Any = "auto",
    statistics: Any = None,
    **operands: Any,
) -> tuple[jax.Array, HeadStatistics]:
    """As `attention`, with what each head did at each query: `HeadStatistics`, computed in the same pass in O(L)
    memory.

    Args:
        statistics: names of those wanted, among `STATISTICS`; None for all. The others are None in the result.
        query, key, value, operands: the arguments of `attention`.

    Raises:
        ValueError, TypeError: as `attention`; ValueError for an unknown statistic.
    """
    query, key, value = check_arrays(query, key, value)
    algebra = build_spec(query, key, **operands)
    return dispatch.attend(implementation, query, key, value, algebra, statistic_names(statistics), precision)


def explain(
    query: Any,
    key: Any,
    value: Any,
    *,
    implementation: Any = "auto",
    statistics: Any = (),
    precision: Any = None,
    **operands: Any,
) -> dispatch.Plan:
    """Which implementation `attention` would run on these arguments, its tile sizes, and why each other one declines.

    Shapes and types suffice: arrays may be `jax.ShapeDtypeStruct` inside `jax.eval_shape`, or tracers. Raises as
    `attention`.
    """
    del precision
    query, key, value = check_arrays(query, key, value)
    algebra = build_spec(query, key, **operands)
    return dispatch.plan(implementation, query, key, value, algebra, statistic_names(statistics))


def attention_weights(query: Any, key: Any, **operands: Any) -> jax.Array:
    """The probabilities p (B, H, Q, K) before gate and dropout: dense, for looking at. float32 or float64.

    Args:
        query, key: as in `attention`. operands: mask, bias, scale, softcap, sink, origin, as there.

    Raises:
        ValueError, TypeError: as `attention`; TypeError for an operand that probabilities do not depend on.
    """
    query, key = check_arrays(query, key)
    problem = _dense(query, key, **_scoring("attention_weights", operands))
    return problem.softmax(problem.scores(query, key))


def head_gram(query: Any, key: Any, **operands: Any) -> jax.Array:
    """G[b, a, c] = sum_ij p_a(i, j) p_c(i, j), (B, H, H): how much heads a and c attend to the same places.

    Its diagonal holds squared norms, so G[a, c] / sqrt(G[a, a] G[c, c]) is the cosine between two attention maps. No Q
    x K memory: tiles of all heads are made, multiplied and forgotten. It has no reverse-mode gradient.

    Args:
        query, key: as in `attention`. operands: mask, bias, scale, softcap, sink, origin, as there.

    Raises:
        ValueError, TypeError: as `attention_weights`.

    Source: the D_pos of Li et al. 2018, "Multi-head attention with disagreement regularization", is -1/H^2 times its
    sum.
    """
    query, key = check_arrays(query, key)
    return gram.gram(query, key, build_spec(query, key, **_scoring("head_gram", operands)))


def dense(query: Any, key: Any, **operands: Any) -> reference.Dense:
    """The problem as one tile of Q x K entries, to be taken step by step: see `Dense`. O(Q K) memory.

    Args:
        query, key: as in `attention`. operands: mask, bias, scale, softcap, sink, head_gate, dropout, origin, as there.

    Raises:
        ValueError, TypeError: as `attention`.
    """
    return _dense(*check_arrays(query, key), **operands)


def _dense(query: jax.Array, key: jax.Array, **operands: Any) -> reference.Dense:
    (batch, length_q, heads, _), length_k = query.shape, key.shape[1]
    return reference.Dense(build_spec(query, key, **operands), (batch, heads, length_q, length_k))


def _scoring(name: str, operands: dict[str, Any]) -> dict[str, Any]:
    """The operands, none of them one that acts after the softmax."""
    for operand in ("head_gate", "dropout"):
        if operand in operands:
            raise TypeError(f"{name} takes no {operand}: it acts after the softmax")
    return operands
