"""S23, S24 and S26: what is restored is what was saved, or an error names the path; a save happened, or it raised."""

import json
import math
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_research.run_dir import CheckpointError, Checkpoints


def layers(depth: int, width: int = 3) -> dict[str, Any]:
    return {"params": {str(i): {"kernel": jnp.full((2, width), float(i))} for i in range(depth)}}


def stacked(depth: int, width: int = 3) -> dict[str, Any]:
    return {"params": {"kernel": jnp.arange(depth * 2 * width, dtype=jnp.float32).reshape(depth, 2, width)}}


@pytest.mark.parametrize("make", [layers, stacked])
@pytest.mark.parametrize("depth,width", [(16, 3), (8, 3), (12, 6)])
def test_another_depth_or_width_is_refused_by_path(make: Any, depth: int, width: int, tmp_path: pathlib.Path) -> None:
    target = make(depth, width)
    before = jax.tree.map(np.array, target)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, make(12), "{}")
        with pytest.raises(CheckpointError, match=r"params/(\d+/)?kernel") as caught:
            checkpoints.restore(target)
    assert "\n" not in str(caught.value)
    jax.tree.map(np.testing.assert_array_equal, target, before)


def test_the_message_says_what_is_missing_extra_or_of_another_shape_or_type(tmp_path: pathlib.Path) -> None:
    saved = {"a": jnp.zeros((2, 3)), "b": jnp.zeros(5), "c": jnp.zeros(7)}
    wanted = {"a": jnp.zeros((2, 4)), "b": jnp.zeros(5, jnp.bfloat16), "d": jnp.zeros(7)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, saved, "{}")
        with pytest.raises(CheckpointError) as caught:
            checkpoints.restore(wanted)
    assert str(caught.value).endswith(
        "does not fit the model: c is in the checkpoint only; d is missing from the checkpoint; "
        "a is float32[2, 3] in the checkpoint and float32[2, 4] in the model; "
        "b is float32[5] in the checkpoint and bfloat16[5] in the model"
    )


def test_typed_and_raw_keys_come_back(tmp_path: pathlib.Path) -> None:
    state = {"typed": jax.random.key(7), "raw": jax.random.PRNGKey(11), "nested": ({"n": jnp.int32(3)}, jnp.ones(2))}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, "{}")
        step, restored = checkpoints.restore(state | {"typed": jax.random.key(0), "raw": jax.random.PRNGKey(0)})
        with pytest.raises(CheckpointError, match=r"typed is key<fry>.* in the checkpoint and uint32 in the model"):
            checkpoints.restore(state | {"typed": jax.random.PRNGKey(7)})
    assert step == 1
    np.testing.assert_array_equal(jax.random.key_data(restored["typed"]), jax.random.key_data(state["typed"]))
    np.testing.assert_array_equal(jax.random.uniform(restored["typed"], (3,)), jax.random.uniform(state["typed"], (3,)))
    np.testing.assert_array_equal(restored["raw"], state["raw"])
    assert restored["nested"][0]["n"] == 3


def test_steps_are_numbers_and_a_save_never_lies(tmp_path: pathlib.Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.save(2, {"x": jnp.zeros(2)}, "{}") == "saved step 2; steps on disk: 2"
        assert checkpoints.save(10, {"x": jnp.full(2, 10.0)}, "{}") == "saved step 10; steps on disk: 2, 10"
        for step in (10, 5):
            with pytest.raises(CheckpointError, match=rf"step {step} was not saved: .* already holds step 10"):
                checkpoints.save(step, {"x": jnp.ones(2)}, "{}")
        assert checkpoints.restore({"x": jnp.zeros(2)})[0] == 10
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [2, 10]
        step, state = checkpoints.restore({"x": jnp.zeros(2)})
    assert step == 10
    np.testing.assert_array_equal(state["x"], [10.0, 10.0])


def test_the_last_and_the_best_are_kept_with_their_metrics(tmp_path: pathlib.Path) -> None:
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: None, 5: 2.5, 6: 1.5}
    with Checkpoints(tmp_path, keep_last=2) as checkpoints:
        for step, loss in losses.items():
            checkpoints.save(step, {"x": jnp.ones(1)}, "{}", None if loss is None else {"valid/loss": loss})
        assert checkpoints.steps() == [2, 5, 6]
        assert checkpoints.metrics(2) == {"valid/loss": 1.0}


def test_the_config_lies_beside_the_state_as_json(tmp_path: pathlib.Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, {"x": jnp.ones(1)}, '{"seed": 4}')
    assert json.loads((tmp_path / "3/config/metadata").read_text()) == {"seed": 4}


def test_an_empty_directory_holds_no_checkpoint(tmp_path: pathlib.Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(FileNotFoundError, match="no checkpoint in"):
            checkpoints.restore({"x": jnp.ones(1)})
        checkpoints.save(3, {"x": jnp.ones(1)}, "{}")
        with pytest.raises(FileNotFoundError, match="no checkpoint of step 4 in"):
            checkpoints.restore({"x": jnp.ones(1)}, step=4)


def test_a_loss_that_is_no_number_is_never_the_best(tmp_path: pathlib.Path) -> None:
    losses = {1: math.nan, 2: 2.0, 3: math.nan, 4: math.inf, 5: 3.0, 6: math.nan}
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        for step, loss in losses.items():
            checkpoints.save(step, {"x": jnp.ones(1)}, "{}", {"valid/loss": loss, "valid/other": 1.0})
        assert checkpoints.steps() == [2, 6]
        assert checkpoints.metrics(2) == {"valid/loss": 2.0, "valid/other": 1.0}


def test_damage_is_one_line_that_says_how_to_go_on(tmp_path: pathlib.Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        for step in (3, 7):
            checkpoints.save(step, {"x": jnp.full(2, float(step))}, "{}", {"valid/loss": 1.0})
    shutil.move(tmp_path / "7/state", tmp_path / "kept")
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match=r"step 7 in .* cannot be restored: .*7 moved away, step 3 is next$"):
            checkpoints.restore({"x": jnp.zeros(2)})
        assert checkpoints.restore({"x": jnp.zeros(2)}, step=3)[0] == 3
    (tmp_path / "7/metrics/metrics").write_text("{")
    with pytest.raises(CheckpointError, match=r"^the checkpoints in .* cannot be read: JSONDecodeError") as caught:
        Checkpoints(tmp_path)
    assert "\n" not in str(caught.value)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="is no directory"):
        Checkpoints(tmp_path / "file")
