"""`dot_product_attention` beside the function of jax.nn whose place it takes, and that function as "xla"."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mha_kernels as mk
from tests.mha_kernels.problems import normal

B, Q, K, H, G, E = 2, 5, 7, 4, 2, 3
KEEP = np.random.default_rng(0).random((B, 1, Q, K)) < 0.6
KEEP[..., 0] = True

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "mask": {"mask": jnp.asarray(KEEP)},
    "bias": {"bias": jnp.asarray(normal(5, 1, H, Q, K), jnp.float32)},
    "key lengths": {"key_value_seq_lengths": jnp.array([3, 7])},
    "query lengths": {"query_seq_lengths": jnp.array([5, 2])},
    "window": {"local_window_size": (2, 1)},
    "one window": {"local_window_size": 3},
    "causal window with bias": {
        "is_causal": True,
        "local_window_size": (2, 0),
        "bias": jnp.asarray(normal(5, B, 1, Q, K), jnp.float32),
    },
}


def arrays(batch: bool = True) -> list[jax.Array]:
    shapes = ((B, Q, H, E), (B, K, G, E), (B, K, G, E))
    return [jnp.asarray(normal(n, *shape[0 if batch else 1 :]), jnp.float32) for n, shape in enumerate(shapes)]


def test_its_arguments_are_those_of_jax() -> None:
    ours, theirs = (inspect.signature(f).parameters for f in (mk.dot_product_attention, jax.nn.dot_product_attention))
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]


@pytest.mark.parametrize("name", CASES)
def test_same_arguments_same_values(name: str) -> None:
    options = CASES[name]
    theirs = jax.jit(lambda *x: jax.nn.dot_product_attention(*x, **options))(*arrays())
    ours = jax.jit(lambda *x: mk.dot_product_attention(*x, **options))(*arrays())
    if name == "query lengths":  # rows beyond them are zeros here and anything there
        assert (ours[1, 2:] == 0).all()
        theirs = theirs.at[1, 2:].set(0)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


def test_one_example_without_a_batch_axis() -> None:
    keep = jnp.asarray(KEEP[0])
    theirs, ours = (
        jax.jit(lambda *x: f(*x, mask=keep))(*arrays(batch=False))  # noqa: B023
        for f in (jax.nn.dot_product_attention, mk.dot_product_attention)
    )
    assert ours.shape == (Q, H, E)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


def test_the_residual_is_log_sum_exp() -> None:
    q, k, v = arrays()
    output, residual = mk.dot_product_attention(q, k, v, return_residual=True, implementation="reference")
    scores = np.einsum("bihe,bjhe->bihj", q, np.repeat(k, 2, axis=2)) / np.sqrt(E)
    np.testing.assert_allclose(residual, np.log(np.exp(scores).sum(-1)), rtol=0, atol=1e-6)
    np.testing.assert_allclose(output, jax.nn.dot_product_attention(q, k, v), rtol=0, atol=1e-6)


DONE: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": mk.CausalMask()},
    "window": {"mask": mk.WindowMask(2, 1)},
    "alibi": {"bias": mk.AlibiBias(mk.alibi_slopes(H)), "mask": mk.CausalMask()},
    "scale": {"scale": 0.3},
}


@pytest.mark.parametrize("name", DONE)
def test_xla_does_what_the_algebra_says(name: str) -> None:
    ours, theirs = (
        jax.jit(lambda *x: mk.attention(*x, implementation=implementation, **DONE[name]))(*arrays())  # noqa: B023
        for implementation in ("reference", "xla")
    )
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-6)


REFUSED: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 2.0},
    "sink": {"sink": jnp.zeros(H)},
    "head gate": {"head_gate": jnp.ones(H)},
    "dropout": {"dropout": mk.Dropout(0.1, jax.random.key(0))},
    "DenseMask may leave a query without keys": {"mask": jnp.asarray(KEEP)},
    "KeyPaddingMask may leave": {"mask": mk.KeyPaddingMask(jnp.ones((B, K), bool))},
    "offset 0 alone": {"mask": mk.CausalMask(1)},
    "a query of this window may have no key": {"mask": mk.WindowMask(-1, 3)},
    "bias of -inf": {"bias": jnp.zeros((Q, K))},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_xla_declines_with_the_reason(reason: str) -> None:
    with pytest.raises(ValueError, match=f"implementation 'xla' cannot do this: .*{reason}"):
        mk.attention(*arrays(), implementation="xla", **REFUSED[reason])
    assert reason in mk.explain(*arrays(), **REFUSED[reason]).declined["xla"]


def test_cudnn_declines_without_a_gpu_and_auto_says_what_runs() -> None:
    with pytest.raises(ValueError, match="implementation 'cudnn' cannot do this: cuDNN needs an NVIDIA GPU"):
        mk.attention(*arrays(), implementation="cudnn")
    plan = mk.explain(*arrays())
    assert plan.implementation == "blockwise"
    assert plan.tiles == {"query_tile": Q, "key_tile": K, "programs": B * H}
    assert str(plan).startswith("blockwise (query_tile 5, key_tile 7, programs 8)\n")
    with pytest.raises(ValueError, match="none of the statistics entropy"):
        mk.attention_with_statistics(*arrays(), implementation="xla", statistics="entropy")


@pytest.mark.parametrize(
    "options, error, message",
    [
        (
            {"key_value_seq_lengths": 2},
            ValueError,
            r"key_value_seq_lengths has shape \(\) .*; expected \(2,\) integers",
        ),
        ({"key_value_seq_lengths": np.array([1])}, ValueError, r"key_value_seq_lengths has shape \(1,\)"),
        ({"query_seq_lengths": np.array([1.0, 2.0])}, ValueError, "query_seq_lengths has .* dtype float32"),
        ({"local_window_size": 2.5}, TypeError, "local_window_size is 2.5; expected"),
        ({"local_window_size": (1,)}, TypeError, r"local_window_size is \(1,\); expected"),
        ({"is_causal": "no"}, TypeError, "is_causal is 'no'; expected a bool"),
        ({"mask": np.ones((3, 3), int)}, TypeError, "mask: DenseMask.keep has dtype int32; expected bool"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_bad_arguments_are_named(options: dict[str, Any], error: type[Exception], message: str) -> None:
    x = np.zeros((2, 3, 1, 4), np.float32)
    with pytest.raises(error, match=message):
        mk.dot_product_attention(x, x, x, **options)
    with pytest.raises(TypeError, match="value is a NoneType"):
        mk.dot_product_attention(x, x, None)
