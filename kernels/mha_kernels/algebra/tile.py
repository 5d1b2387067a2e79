"""The mathematics of attention on one tile: the only place where it is written.

Pure functions of arrays and positions. A driver (reference, blockwise, Pallas) brings a tile of q.k products and the
slice of the `AttentionSpec` that belongs to it, calls these, multiplies by value tiles, and stores. Arrays are
(..., Qt, Kt) for a tile and (..., Qt, 1) for its rows; leading axes, if any, are several (batch, head) pairs at once.

    s = softcap(scale * q.k) + bias, -inf where the mask forbids           tile_scores
    m, l, sum_j e_j x_j   with e = exp(s - m), over tiles of keys          softmax_update
    o = sum_j e_j v_j / l,  lse = m + log l                                softmax_finish
    ds = p * (dp - sum_j p_j dp_j)                                         compute_delta, tile_gradients

The rescaling sum over tiles is Milakov and Gimelshein 2018; the backward pass by recomputation is Dao et al. 2022.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mha_kernels.algebra.masks import used_by_distance
from mha_kernels.algebra.operands import Tile
from mha_kernels.algebra.spec import AttentionSpec, HeadStatistics


def tile_scores(product: jax.Array, at: Tile, algebra: AttentionSpec) -> jax.Array:
    """Scores of a tile from its q.k products: scaled, softcapped, biased, and -inf where forbidden."""
    scores = algebra.scale.astype(product.dtype) * product
    if algebra.softcap is not None:
        softcap = algebra.softcap.astype(product.dtype)
        scores = softcap * jnp.tanh(scores / softcap)
    if algebra.bias is not None:
        scores = scores + algebra.bias.tile(at).astype(product.dtype)
    allowed = tile_allowed(at, algebra)
    return scores if allowed is None else jnp.where(allowed, scores, -jnp.inf)


def scale_query(query: jax.Array, algebra: AttentionSpec) -> jax.Array:
    """Query rows times the scale: with `unscaled` this moves the scale from every score to every query, as
    (scale q).k = scale (q.k)."""
    return algebra.scale.astype(query.dtype) * query


def unscaled(algebra: AttentionSpec) -> AttentionSpec:
    """The algebra for queries that were `scaled`."""
    return dataclasses.replace(algebra, scale=jnp.ones_like(algebra.scale))


def tile_allowed(at: Tile, algebra: AttentionSpec) -> Any:
    """Boolean, broadcastable to the tile: which entries may be attended; None where all may."""
    allowed = None if algebra.mask is None else algebra.mask.allowed(at)
    if at.end is not None:
        real = at.key < at.end
        allowed = real if allowed is None else allowed & real
    if at.query_end is not None:  # else a padded query would count as one that uses a key: see `zero_unattended_rows`
        real = at.query < at.query_end
        allowed = real if allowed is None else allowed & real
    if algebra.bias is not None and algebra.bias.forbids:
        # NaN forbids nothing, since it must be seen; != has another opinion of NaN on a TPU than on a GPU.
        bias = algebra.bias.tile(at)
        finite = jnp.where(bias == -jnp.inf, 0, jnp.ones_like(bias)) > 0
        allowed = finite if allowed is None else allowed & finite
    if algebra.head_gate is not None:  # a closed head attends nothing, so nothing in it can matter
        is_open = algebra.head_gate != 0
        allowed = is_open if allowed is None else allowed & is_open
    return allowed


def zero_unattended_rows(rows: jax.Array, allowed: Any, axis: int) -> jax.Array:
    """Zeroes the rows (query or key vectors of a tile) that take part in no allowed pair.

    0 * NaN is NaN: whatever lies in padding or in unused cache slots must be gone before it meets a matrix product.
    `allowed` is the full tile; `axis` is the one to reduce over: -2 for keys, -1 for queries.
    """
    return jnp.where(allowed.any(axis=axis)[..., None], rows, 0)


def attended_rows(at: Tile, algebra: AttentionSpec, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """(queries (..., Qt, 1), keys (..., Kt, 1)): which rows of a tile of that shape take part in an allowed pair.

    What `zero_unattended_rows` does, without a pass over the tile where the mask alone knows; None where all do.
    """
    allowed = tile_allowed(at, algebra)
    if allowed is None:
        return None, None
    queries = keys = None
    if algebra.bias is None or not algebra.bias.forbids:
        queries, keys = used_by_distance(at, None, None) if algebra.mask is None else algebra.mask.used(at)
    if queries is None or keys is None:
        allowed = jnp.broadcast_to(allowed, shape)
        return allowed.any(axis=-1)[..., None], allowed.any(axis=-2)[..., None]
    if algebra.head_gate is not None:
        queries, keys = (rows & (algebra.head_gate != 0) for rows in (queries, keys))
    return queries, keys.swapaxes(-1, -2)


class Softmax(NamedTuple):
    """Running state of the softmax over the keys seen so far, per query row (..., Qt, 1).

    maximum m, total = sum_j exp(s_j - m), and for each requested statistic the moment sum_j exp(s_j - m) x_j.
    """

    maximum: jax.Array
    denominator: jax.Array
    moments: dict[str, jax.Array]


MOMENTS = ("entropy", "distance", "sink_mass", "diagonal_mass", "previous_mass")


def softmax_start(rows: tuple[int, ...], dtype: Any, statistics: tuple[str, ...]) -> Softmax:
    """The state before any key; rows is (..., Qt, 1)."""
    zeros = jnp.zeros(rows, dtype)
    return Softmax(jnp.full(rows, -jnp.inf, dtype), zeros, {name: zeros for name in MOMENTS if name in statistics})


def softmax_update(state: Softmax, scores: jax.Array, at: Tile) -> tuple[Softmax, jax.Array, jax.Array]:
    """Takes in a tile of scores.

    Returns the new state, the tile of exp(s - m) to multiply the values with, and the factor by which everything summed
    before has to be multiplied.
    """
    largest = jax.lax.stop_gradient(jnp.maximum(state.maximum, scores.max(axis=-1, keepdims=True)))
    shift = jnp.where(largest == -jnp.inf, 0, largest)
    weights = jnp.exp(scores - shift)
    alpha = jnp.exp(state.maximum - shift)
    denominator = state.denominator * alpha + weights.sum(axis=-1, keepdims=True)
    moments = {}
    some = weights > 0
    for name, moment in state.moments.items():
        if name == "entropy":  # sum of e (s - m): moving m moves each earlier term by (m_old - m_new)
            drop = jnp.where(state.denominator > 0, state.maximum - shift, 0)
            moment = moment + drop * state.denominator
            number = jnp.where(some, scores - shift, 0)
        else:
            number = moment_weight(name, at).astype(weights.dtype)
        terms = jnp.where(some, weights * number, 0)  # the select is for XLA's CPU, which sums bare products slowly
        moments[name] = moment * alpha + terms.sum(axis=-1, keepdims=True)
    return Softmax(largest, denominator, moments), weights, alpha


def moment_weight(name: str, at: Tile) -> jax.Array:
    """The number that a statistic averages over the keys, on the tile."""
    if name == "distance":
        return jnp.abs(at.query - at.key)
    if name == "sink_mass":
        return at.key == 0
    if name == "diagonal_mass":
        return at.key == at.query
    return at.key == at.query - 1


def apply_dropout(weights: jax.Array, at: Tile, algebra: AttentionSpec) -> jax.Array:
    """The tile of weights (or of their gradient) after dropout, which follows normalisation."""
    if algebra.dropout is None:
        return weights
    return jnp.where(algebra.dropout.keep(at), weights * algebra.dropout.scale(), 0)


def softmax_finish(
    state: Softmax, values: jax.Array, algebra: AttentionSpec, statistics: tuple[str, ...]
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Normalises: the state and sum_j e_j v_j (..., Qt, V) become the head's output and rows (..., Qt, 1), "lse" among
    them.
    """
    share, results = softmax_rows(state, algebra, statistics)
    return apply_gate(values * share, algebra), results


def softmax_rows(
    state: Softmax, algebra: AttentionSpec, statistics: tuple[str, ...]
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Of each row (..., Qt, 1): what sums over e_j are multiplied with to be sums over p_j, and "lse" and the
    statistics.
    """
    empty = state.denominator == 0  # NaN is not, so that no statistic hides it
    denominator = jnp.where(empty, 1, state.denominator)
    log_total = jnp.log(denominator)
    lse_keys = jnp.where(empty, -jnp.inf, state.maximum + log_total)
    lse = lse_keys
    mass = jnp.where(empty, 0, jnp.ones_like(denominator))  # what the keys hold together, less than 1 beside a sink
    if algebra.sink is not None:
        sink = closed_as_zero(algebra.sink.astype(denominator.dtype), algebra)
        lse = jnp.logaddexp(lse_keys, sink)
        mass = jnp.where(empty, 0, jax.nn.sigmoid(jnp.where(empty, 0, lse_keys) - sink))
    share = mass / denominator
    results = {"lse": lse}
    for name, moment in state.moments.items():
        results[name] = moment * share
        if name == "entropy":
            above = log_total - jnp.where(empty, 0, jnp.log(jnp.where(empty, 1, mass)))  # lse - m
            results[name] = mass * above - results[name]
    if "max_logit" in statistics:
        results["max_logit"] = jax.lax.stop_gradient(state.maximum)
    if "max_probability" in statistics:
        results["max_probability"] = jax.lax.stop_gradient(share)
    return share, results


def apply_gate(output: jax.Array, algebra: AttentionSpec) -> jax.Array:
    """Output (or its cotangent) times the head gate; exactly zero, whatever the head holds, where the gate is zero."""
    if algebra.head_gate is None:
        return output
    return closed_as_zero(algebra.head_gate.astype(output.dtype) * output, algebra)


def closed_as_zero(rows: jax.Array, algebra: AttentionSpec) -> jax.Array:
    """Rows of heads, zero where the head's gate is."""
    return rows if algebra.head_gate is None else jnp.where(algebra.head_gate == 0, 0, rows)


def normalize(scores: jax.Array, lse: jax.Array) -> jax.Array:
    """Probabilities from scores and log-sum-exp; 0 for a row that attends nothing."""
    return jnp.exp(scores - jnp.where(lse == -jnp.inf, jnp.inf, lse))


def compute_delta(
    output_product: jax.Array, results: dict[str, jax.Array], cotangents: dict[str, jax.Array], mass: jax.Array
) -> jax.Array:
    """sum_j p_j dp_j for each row, from what the forward pass kept, less the cotangent of lse.

    output_product: sum over V of output * its cotangent. mass: sum_j p_j.
    """
    delta = output_product
    for name, cotangent in cotangents.items():
        if name == "entropy":
            delta = delta + cotangent * (results[name] - mass)
        elif name in MOMENTS:
            delta = delta + cotangent * results[name]
    if "lse" in cotangents:
        delta = delta - cotangents["lse"]
    return delta


def sink_share(lse: jax.Array, algebra: AttentionSpec) -> Any:
    """The probability that the sink takes, per row; 0 without a sink and in a closed head."""
    return 0 if algebra.sink is None else closed_as_zero(jnp.exp(algebra.sink.astype(lse.dtype) - lse), algebra)


def score_gradient(
    probabilities: jax.Array,
    log_probabilities: jax.Array,
    value_product: jax.Array,
    delta: jax.Array,
    cotangents: dict[str, jax.Array],
    at: Tile,
    algebra: AttentionSpec,
) -> jax.Array:
    """The cotangent of a tile of scores.

    value_product: (gated) output cotangent . v, the cotangent of the dropped probabilities. delta: of
    `compute_delta`.
    """
    gradient = apply_dropout(value_product, at, algebra) - delta
    for name, cotangent in cotangents.items():
        if name == "entropy":
            log_p = jnp.where(probabilities > 0, log_probabilities, 0)
            gradient = gradient - cotangent * (log_p + 1)
        elif name in MOMENTS:
            gradient = gradient + cotangent * moment_weight(name, at).astype(gradient.dtype)
    return probabilities * gradient


class TileGradients(NamedTuple):
    """What a tile gives: dropped probabilities, and the cotangents of its products, of operands and of its scores."""

    weights: jax.Array
    product: jax.Array
    leaves: Any
    scores: jax.Array


def tile_gradients(
    product: jax.Array,
    dp: jax.Array,
    rows: tuple[jax.Array, jax.Array, dict[str, jax.Array]],
    at: Tile,
    algebra: AttentionSpec,
    leaves: Any,
    with_leaves: Callable[[Any], AttentionSpec],
) -> TileGradients:
    """The backward pass of one tile, between the two products that lead to it and those that follow.

    product: q.k. dp: output cotangent . v. rows: lse, delta, and cotangents of statistics. leaves: the
    operands to differentiate; `with_leaves` gives the algebra that holds them.
    """
    lse, delta, cotangents = rows

    def scores_of(product: jax.Array, leaves: Any) -> jax.Array:
        return tile_scores(product, at, with_leaves(leaves))

    scores, pull_back = jax.vjp(scores_of, product, leaves)
    weights = normalize(scores, lse)
    ds = score_gradient(weights, scores - lse, dp, delta, cotangents, at, algebra)
    of_product, of_leaves = pull_back(ds)
    return TileGradients(apply_dropout(weights, at, algebra), of_product, of_leaves, ds)


def statistics_of(results: dict[str, jax.Array], names: tuple[str, ...], algebra: AttentionSpec) -> HeadStatistics:
    """Rows (..., Q, 1) of statistics as `HeadStatistics` (..., Q), NaN where the gate is zero."""
    chosen = {}
    for name in names:
        value = results[name]
        if algebra.head_gate is not None:
            value = jnp.where(algebra.head_gate == 0, jnp.nan, value)
        chosen[name] = value[..., 0]
    return HeadStatistics(**chosen)
