"""Multi-head attention in float64 NumPy, one example and head at a time: what every module is held to."""

import numpy as np


def softmax(scores, allowed, sink=None):
    """Row-wise softmax of (Q, K) over the allowed keys, zero rows where there are none; `sink` is a logit that takes
    mass.
    """
    probabilities = np.zeros_like(scores)
    for i, row in enumerate(scores):
        keys = np.flatnonzero(allowed[i] & (row > -np.inf))
        if len(keys):
            top = max(row[keys].max(), -np.inf if sink is None else sink)
            mass = np.exp(row[keys] - top)
            probabilities[i, keys] = mass / (mass.sum() + (0 if sink is None else np.exp(sink - top)))
    return probabilities


def heads(query, key, value, scale, allowed=None, bias=None, sink=None, softcap=None):
    """Head outputs (B, Q, H, V) and probabilities (B, H, Q, K) of heads (B, L, H|G, .)."""
    (B, Q, H, _), (_, K, G, V) = query.shape, value.shape
    allowed = np.broadcast_to(True if allowed is None else allowed, (B, H, Q, K))
    bias = np.broadcast_to(0.0 if bias is None else bias, (B, H, Q, K))
    output, probabilities = np.zeros((B, Q, H, V)), np.zeros((B, H, Q, K))
    for b in range(B):
        for h in range(H):
            g = h // (H // G)
            scores = scale * query[b, :, h] @ key[b, :, g].T
            scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
            p = softmax(scores + bias[b, h], allowed[b, h], None if sink is None else sink[h])
            probabilities[b, h] = p
            output[b, :, h] = p[:, p.any(0)] @ value[b, p.any(0), g]
    return output, probabilities


def project(x, linear):
    """x (B, L, D) through a flax projection to heads, in float64."""
    kernel = np.asarray(linear.kernel[...], np.float64)
    out = np.einsum("bld,dhe->blhe", np.asarray(x, np.float64), kernel)
    return out if linear.bias is None else out + np.asarray(linear.bias[...], np.float64)


def merge(head_outputs, linear):
    """Head outputs (B, Q, H, V) through the output projection: concatenation times the flat matrix."""
    kernel = np.asarray(linear.kernel[...], np.float64)
    flat = head_outputs.reshape(*head_outputs.shape[:2], -1) @ kernel.reshape(-1, kernel.shape[-1])
    return flat if linear.bias is None else flat + np.asarray(linear.bias[...], np.float64)


def module(m, query, key=None, value=None, **scores):
    """Output and probabilities of a plain `MultiHeadAttention` with separate projections."""
    key = query if key is None else key
    value = key if value is None else value
    q, k, v = project(query, m.query), project(key, m.key), project(value, m.value)
    out, probabilities = heads(q, k, v, m.scale, **scores)
    return merge(out, m.output), probabilities
