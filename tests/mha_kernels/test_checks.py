"""Bad arguments: each message names the argument, what came and what was expected."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mha_kernels as mk

B, Q, K, H, G, E = 2, 5, 7, 6, 3, 4


def zeros(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.zeros(shape, dtype)


ARRAYS = {"query": zeros(B, Q, H, E), "key": zeros(B, K, G, E), "value": zeros(B, K, G, 3)}

SIZES: list[tuple[dict[str, Any], str]] = [
    ({"query": zeros(Q, H, E)}, r"query has shape \(5, 6, 4\); expected rank 4, \(B, Q, H, E\)"),
    ({"value": zeros(K, G, E)}, r"value has shape \(7, 3, 4\); expected rank 4, \(B, K, G, V\)"),
    ({"key": zeros(B, 0, G, E)}, r"key has shape \(2, 0, 3, 4\); expected no empty axis"),
    ({"key": zeros(3, K, G, E)}, "key has batch size 3; expected 2, that of query"),
    ({"key": zeros(B, K, G, 5)}, "key has width 5; expected 4, that of query"),
    ({"key": zeros(B, K, 4, E)}, "query has 6 heads and key has 4; expected a multiple"),
    ({"value": zeros(B, K, 2, 3)}, r"value has shape \(2, 7, 2, 3\); expected \(2, 7, 3\) \+ \(V,\), as key"),
    ({"mask": jnp.ones((B, K), bool)}, r"mask: DenseMask.keep has shape \(2, 7\); expected \(Q = 5, K = 7\)"),
    ({"mask": jnp.ones((Q,), bool)}, r"mask: DenseMask.keep has shape \(5,\); expected rank 2 \(Q, K\) or 4"),
    ({"mask": mk.KeyPaddingMask(jnp.ones((B, Q), bool))}, r"KeyPaddingMask.keep has shape \(2, 5\).*K = 7"),
    (
        {"mask": mk.SegmentMask(jnp.zeros((B, K), int), jnp.zeros((B, K), int))},
        r"SegmentMask.query_ids has shape \(2, 7\); expected \(B = 2, Q = 5\)",
    ),
    ({"bias": zeros(B, G, Q, K)}, r"bias: DenseBias.values has shape \(2, 3, 5, 7\); .*H = 6"),
    ({"bias": mk.AlibiBias(zeros(G))}, r"bias: AlibiBias.slopes has shape \(3,\); expected \(H = 6\)"),
    ({"bias": mk.T5Bias(zeros(32))}, r"bias: T5Bias.table has shape \(32,\); expected axes \(H, N\)"),
    ({"bias": mk.T5Bias(zeros(H, 3))}, "num_buckets 3, max_distance 128: expected num_buckets >= 4"),
    ({"sink": zeros(G)}, r"sink has shape \(3,\); expected \(H = 6\)"),
    ({"head_gate": zeros(Q, H)}, r"head_gate has shape \(5, 6\); expected \(B = 2, H = 6\)"),
    ({"head_gate": zeros(B, H, 1)}, r"head_gate has shape \(2, 6, 1\); expected \(H,\) or \(B, H\)"),
    ({"scale": zeros(H)}, r"scale has shape \(6,\); expected a number"),
    ({"scale": float("nan")}, "scale is nan; expected a finite number"),
    ({"scale": np.float32("inf")}, "scale is .*inf.*; expected a finite number"),
    ({"softcap": 0.0}, r"softcap is 0\.0; expected a positive, finite number"),
    ({"softcap": -2}, "softcap is -2; expected a positive, finite number"),
    ({"softcap": np.float32(-2)}, r"softcap is .*-2\.0.*; expected a positive, finite number"),
    ({"mask": mk.CausalMask(2**31)}, "CausalMask.offset goes from 2147483648 to .*; expected what fits in int32"),
    ({"mask": mk.WindowMask(2**31 - 1, 0)}, r"WindowMask.left is 2147483647; expected .* -2\*\*30 and 2\*\*30"),
    ({"mask": mk.SegmentMask(np.full((B, Q), 2**40), np.zeros((B, K), int))}, "query_ids goes from 1099511627776"),
    ({"origin": mk.Origin(key=-(2**31))}, r"origin\.key is -2147483648; expected an integer between"),
    ({"bias": mk.ClippedBias(zeros(H, 4))}, "ClippedBias.table has 4 entries a head; expected an odd number"),
    ({"bias": mk.DistanceBias(zeros(H, 0))}, r"DistanceBias.table has shape \(6, 0\); expected no empty axis"),
    ({"bias": mk.T5Bias(zeros(H, 32), max_distance=20.5)}, "num_buckets 32, max_distance 20.5: .*both integers"),
    ({"statistics": ("entropy", "perplexity")}, "statistics has 'perplexity'; expected names among lse, entropy"),
    ({"implementation": "flash"}, "implementation is 'flash'; expected 'auto' or one of reference, blockwise"),
]
TYPES: list[tuple[dict[str, Any], str]] = [
    ({"query": zeros(B, Q, H, E, dtype=jnp.int32)}, "query has dtype int32; expected float16, bfloat16, float32"),
    ({"query": None}, r"query is a NoneType \(object\); expected an array of numbers"),
    ({"value": None}, r"value is a NoneType \(object\); expected an array of numbers"),
    ({"key": "key"}, r"key is a str \(<U3\); expected an array of numbers"),
    ({"key": [[1.0], [1.0, 2.0]]}, "key is a list; expected an array of numbers"),
    ({"query": zeros(B, Q, H, E, dtype=jnp.float8_e5m2)}, "query has dtype float8_e5m2; expected float16"),
    ({"mask": mk.CausalMask(None)}, "mask: CausalMask.offset is None; expected int"),
    ({"mask": mk.KeyPaddingMask(None)}, "mask: KeyPaddingMask.keep is None; expected bool"),
    ({"mask": mk.CausalMask() & mk.DenseMask(None)}, "mask: DenseMask.keep is None; expected bool"),
    ({"bias": mk.AlibiBias(None)}, "bias: AlibiBias.slopes is None; expected float"),
    ({"head_gate": [[1.0], [1.0, 2.0]]}, "head_gate is a list; expected an array of numbers"),
    ({"dropout": mk.Dropout(0.5, None)}, "dropout key is None; expected one JAX random key"),
    ({"dropout": mk.Dropout(0.5, jax.random.split(jax.random.key(0)))}, "(?s)dropout key is .*; expected one JAX"),
    ({"statistics": 3}, "statistics is 3; expected names among lse, entropy"),
    ({"implementation": mk.Blockwise}, "implementation is a type; expected a name or an object such as Blockwise"),
    ({"implementation": np.zeros(3)}, "implementation is a ndarray; expected a name or an object such as Blockwise"),
    ({"mask": jnp.ones((Q, K), jnp.int8)}, "mask has dtype int8; expected bool"),
    ({"mask": zeros(Q, K)}, "mask has dtype float32; expected bool"),
    ({"mask": mk.KeyPaddingMask(zeros(B, K))}, "mask: KeyPaddingMask.keep has dtype float32; expected bool"),
    ({"mask": mk.AlibiBias(zeros(H))}, "mask is a AlibiBias; expected a Mask or an array"),
    ({"mask": "causal"}, "mask is str; expected a Mask or an array"),
    ({"mask": mk.CausalMask(0.5)}, "mask: CausalMask.offset has dtype float.*; expected int"),
    ({"bias": mk.CausalMask()}, "bias is a CausalMask; expected a Bias or an array"),
    ({"bias": jnp.zeros((Q, K), int)}, "bias: DenseBias.values has dtype int32; expected float"),
    ({"sink": jnp.zeros(H, int)}, "sink has dtype int32; expected float"),
    ({"scale": 1j}, "scale has dtype complex.*; expected a real number"),
    ({"origin": 3}, r"origin is 3; expected an Origin\(batch, head, query, key\)"),
    ({"origin": mk.Origin(query=0.5)}, r"origin\.query has dtype float.* and shape \(\); expected an integer"),
    ({"implementation": 3}, "implementation is a int; expected a name or an object such as Blockwise"),
]


def call(changed: dict[str, Any]) -> None:
    mk.attention_with_statistics(**(ARRAYS | {"implementation": "reference", "statistics": ()} | changed))


@pytest.mark.parametrize("changed, message", SIZES, ids=lambda x: x if isinstance(x, str) else "")
def test_wrong_shapes_and_values(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(changed)


@pytest.mark.parametrize("changed, message", TYPES, ids=lambda x: x if isinstance(x, str) else "")
def test_wrong_types(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call(changed)


@pytest.mark.parametrize("wrong", [0, -4, 2.0, True, "8"])
def test_tile_sizes(wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"Blockwise key_tile is {wrong!r}; expected a positive integer or None"):
        mk.Blockwise(key_tile=wrong)


def test_integers_for_t5_buckets() -> None:
    with pytest.raises(TypeError, match="relative_position has dtype float32; expected integers"):
        mk.t5_bucket(np.array([3.7]), True)
    with pytest.raises(ValueError, match=r"num_buckets '8', max_distance 128: .*both integers"):
        mk.t5_bucket(3, True, num_buckets="8")  # type: ignore[arg-type]


def test_bad_arguments_are_found_under_jit_too() -> None:
    with pytest.raises(ValueError, match="key has width 5; expected 4"):
        jax.jit(lambda q, k: mk.attention(q, k, k))(zeros(B, Q, H, E), zeros(B, K, G, 5))


def test_numpy_arrays_and_numbers_are_fine() -> None:
    q, kv = np.ones((B, Q, H, E), np.float32), np.ones((B, K, G, E), np.float32)
    options: dict[str, Any] = {"mask": np.ones((Q, K), bool), "bias": np.zeros((Q, K), np.float32), "scale": 1}
    output = mk.attention(q, kv, kv, softcap=np.float32(2), sink=np.full(H, -np.inf, np.float32), **options)
    np.testing.assert_allclose(output, np.ones((B, Q, H, E)), rtol=1e-6)


def test_lists_variables_and_narrow_integers_are_fine() -> None:
    class Variable:
        def __jax_array__(self) -> jax.Array:
            return jnp.full(H, 0.5)

    q, kv = np.ones((B, Q, H, E)).tolist(), np.ones((B, K, G, E)).tolist()
    mask = mk.WindowMask(np.uint8(200), np.uint32(3))  # -left may not wrap around
    options: dict[str, Any] = {"mask": mask, "head_gate": Variable(), "dropout": mk.Dropout(np.float32(0), None)}
    for implementation in ("reference", mk.Blockwise(3, 2)):
        output = mk.attention(q, kv, kv, implementation=implementation, **options)
        np.testing.assert_allclose(output, np.full((B, Q, H, E), 0.5), rtol=1e-6)
    options["head_gate"] = [0.5] * H
    np.testing.assert_allclose(mk.attention(q, kv, kv, **options), np.full((B, Q, H, E), 0.5), rtol=1e-6)


@pytest.mark.parametrize("implementation", ["reference", mk.Blockwise(3, 2)], ids=str)
@pytest.mark.parametrize("where", ["query", "bias"])
def test_nan_that_is_attended_is_seen(implementation: Any, where: str) -> None:
    """A NaN forbids no key and is no empty row: output and statistics of its row say NaN, and no other row does."""
    query, kv = np.ones((1, 4, 1, 2), np.float32), np.ones((1, 5, 1, 2), np.float32)
    bias = np.zeros((4, 5), np.float32)
    if where == "query":
        query[0, 1, 0, 0] = np.nan
    else:
        bias[1] = np.nan
    output, rows = mk.attention_with_statistics(query, kv, kv, bias=bias, implementation=implementation)
    for name in mk.STATISTICS:
        assert np.isnan(getattr(rows, name)[0, 0]).tolist() == [False, True, False, False], name
    assert np.isnan(output[0, :, 0]).tolist() == [[False] * 2, [True] * 2, [False] * 2, [False] * 2]
