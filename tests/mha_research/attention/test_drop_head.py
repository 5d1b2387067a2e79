"""DropHead: the rescaling, the keep-all rule, schedules and importance; and what it does inside a module."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mha_research import DropHead, HeadImportance, MultiHeadAttention, update_importance
from tests.mha_research.attention.helpers import normal, run

KEY = jax.random.key(0)


def test_gates_are_zero_or_heads_over_kept_each_example_by_itself():
    gates = np.asarray(DropHead(0.3).gates(KEY, 5000, 4))
    kept = (gates > 0).sum(1)
    np.testing.assert_allclose(gates.max(1), 4 / kept, rtol=1e-6)
    assert set(np.unique(gates[kept == 3])) == {0.0, np.float32(4 / 3)}
    np.testing.assert_allclose(gates.sum(1), 4, rtol=1e-6)
    # P(dropped) = 0.3, but the 0.3^4 of all four dropped keep all.
    assert (gates == 0).mean() == pytest.approx(0.3 - 0.3**4, abs=0.01)


def test_all_heads_are_kept_where_none_would_be():
    np.testing.assert_array_equal(DropHead(0.9999999).gates(KEY, 3, 2), np.ones((3, 2)))
    np.testing.assert_array_equal(DropHead(0.7).gates(KEY, 7, 1), np.ones((7, 1)))
    np.testing.assert_array_equal(DropHead(0.0).gates(KEY, 3, 2), np.ones((3, 2)))


def test_schedules():
    linear = DropHead(0.4, "linear", steps=10)
    assert [float(linear.rate_at(s)) for s in (0, 5, 10, 99)] == pytest.approx([0, 0.2, 0.4, 0.4])
    down = DropHead(0.1, "linear", steps=10, start_rate=0.5)
    assert float(down.rate_at(5)) == pytest.approx(0.3)
    v = DropHead(0.4, "v_shaped", steps=10, start_rate=0.2)
    assert [float(v.rate_at(s)) for s in (0, 2.5, 5, 7.5, 10, 20)] == pytest.approx(
        [0.2, 0.1, 0, 0.2, 0.4, 0.4], abs=1e-7
    )
    assert float(DropHead(0.4, "v_shaped", steps=10).rate_at(0)) == pytest.approx(0.4)
    assert DropHead(0.4).rate_at(None) == 0.4
    with pytest.raises(ValueError, match="needs step"):
        linear.gates(KEY, 1, 2)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((-0.1,), "-0.1"),
        ((float("nan"),), "nan"),
        ((1.5,), "1.5"),
        ((0.1, "cosine"), "'cosine'"),
        ((0.1, "linear"), "steps"),
        ((0.1, "linear", 5, 1.0), "start_rate"),
    ],
    ids=str,
)
def test_bad_choices_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        DropHead(*arguments)


def test_importance_decides_who_is_dropped():
    drop = DropHead(0.25, importance_power=1.0)
    gates = np.asarray(drop.gates(KEY, 20000, 4, importance=jnp.array([1.0, 1.0, 2.0, 0.0])))
    np.testing.assert_allclose((gates == 0).mean(0), [0.25, 0.25, 0.5, 0.0], atol=0.015)
    gates = np.asarray(DropHead(0.25, importance_power=-1.0).gates(KEY, 20000, 2, importance=jnp.array([1.0, 3.0])))
    # p = (0.375, 0.125); both dropped, which keeps both, has probability 0.047.
    np.testing.assert_allclose((gates == 0).mean(0), [0.375 - 0.047, 0.125 - 0.047], atol=0.01)
    with pytest.raises(ValueError, match="importance"):
        drop.gates(KEY, 2, 4)


def test_running_importance_is_the_mean_of_gate_times_gradient_over_kept_examples():
    gates = jnp.array([[2.0, 0.0, 1.0], [2.0, 0.0, 0.0]])
    gradient = jnp.array([[-1.0, 0.0, 3.0], [0.5, 0.0, 0.0]])
    updated = update_importance(jnp.array([1.0, 7.0, 1.0]), gates, gradient, decay=0.9)
    np.testing.assert_allclose(updated, [0.9 + 0.1 * 1.5, 7.0, 0.9 + 0.1 * 3.0], rtol=1e-6)


def test_a_module_drops_heads_in_training_alone_and_its_importance_is_state_of_its_own():
    x = normal(0, 64, 3, 8)
    m = MultiHeadAttention(8, 2, drop_head=DropHead(0.5, importance_power=1.0), rngs=nnx.Rngs(0))
    m.head_importance[...] = jnp.array([1.0, 0.0])
    trained = run(m, x, deterministic=False, rngs=KEY)
    both, second = run(m, x), run(m, x, head_gate=jnp.array([0.0, 2.0]))
    is_second = np.isclose(trained, second, atol=1e-5).all((1, 2))
    is_both = np.isclose(trained, both, atol=1e-5).all((1, 2))
    # Mean rate 0.5, all of the weight on head 0: it is always dropped, head 1 never.
    assert is_second.all()
    assert not is_both.any()
    importance, parameters = nnx.state(m, HeadImportance), nnx.state(m, nnx.Param)
    assert len(jax.tree.leaves(importance)) == 1
    assert len(jax.tree.leaves(parameters)) == 8
