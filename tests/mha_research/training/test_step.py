"""The update: loss per real token (S25), what is decayed, schedules, and gradients that are not finite."""

import dataclasses
import json
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from mha_research.config import ConfigError, default_config, override
from mha_research.factory.build import build_task
from mha_research.factory.optimizer import build_optimizer, build_schedule, decayed
from mha_research.tasks import TaskSpec
from mha_research.training import train
from mha_research.training.evaluate import evaluation_row, head_row
from mha_research.training.step import (
    Program,
    accumulate,
    build_program,
    square_values,
    token_values,
    zero_sums,
)


def linear_loss(w: jax.Array, batch: dict[str, jax.Array], _: Any, total: jax.Array) -> tuple[jax.Array, dict]:
    """The loss of token i is w c_i."""
    loss = jnp.sum(jnp.where(batch["mask"], w * batch["c"], 0.0))
    return loss / total, {"loss": loss, "hits": jnp.zeros(()), "count": jnp.sum(batch["mask"], dtype=jnp.float32)}


def accumulated(c: list[list[float]], mask: list[list[int]], parts: int, w: float = 0.0) -> tuple[dict, jax.Array]:
    batch = {"c": jnp.array(c), "mask": jnp.array(mask, bool)}
    return accumulate(jax.value_and_grad(linear_loss, has_aux=True), jnp.float32(w), batch, parts)


def placed(state: Any) -> Any:
    """Where the loop puts it; a state placed otherwise would have the update compiled once more."""
    return jax.device_put(state, jax.devices()[0])


C = [[10.0] + [1000.0] * 8, [0.0] * 9]
MASK = [[1] + [0] * 8, [1] * 9]


@pytest.mark.parametrize("parts", [1, 2])
def test_accumulation_weighs_parts_by_their_real_tokens(parts: int) -> None:
    """S25: one real token of 10 and nine of 0 have a mean gradient of 1, and not the 5 of a mean of means."""
    sums, gradient = accumulated(C, MASK, parts, w=1.0)
    assert float(gradient) == pytest.approx(1.0, abs=1e-6)
    assert float(sums["loss"] / sums["count"]) == pytest.approx(1.0, abs=1e-6)


def test_a_part_without_real_tokens_adds_nothing() -> None:
    sums, gradient = accumulated([[3.0, 5.0], [7.0, 7.0]], [[1, 1], [0, 0]], 2)
    assert float(gradient) == 4.0
    assert float(sums["count"]) == 2.0
    sums, gradient = accumulated([[3.0], [5.0]], [[0], [0]], 2)
    assert float(gradient) == 0.0


def test_sgd_with_rate_one_moves_by_the_mean() -> None:
    config = override(
        default_config(),
        {"optimizer.rule.name": "sgd", "optimizer.learning_rate": 1.0, "optimizer.warmup_steps": 0}
        | {"optimizer.schedule.name": "constant"},
    )
    _, gradient = accumulated(C, MASK, 2)
    optimizer = build_optimizer(config)
    change, _ = optimizer.update({"w": gradient}, optimizer.init({"w": jnp.float32(0)}), {"w": jnp.float32(0)})
    assert float(change["w"]) == pytest.approx(-1.0, abs=1e-6)


def test_square_values_by_hand() -> None:
    outputs = jnp.array([[[1.0, 3.0], [0.0, 0.1], [jnp.nan, 0.0]]])
    targets = jnp.array([[[0.0, 1.0], [0.0, 0.0], [0.0, 0.0]]])
    values = square_values(outputs, targets, jnp.array([[True, True, False]]))
    np.testing.assert_allclose(values["loss"], [[2.5, 0.005, 0.0]], rtol=1e-6)
    np.testing.assert_array_equal(values["hits"], [[0, 1, 0]])
    np.testing.assert_array_equal(values["count"], [[1, 1, 0]])


def test_token_sums_by_hand() -> None:
    logits = jnp.log(jnp.array([[[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [jnp.nan, 1.0, 1.0]]]))
    sums = jax.tree.map(jnp.sum, token_values(logits, jnp.array([[1, 1, 0]]), jnp.array([[True, True, False]])))
    assert float(sums["loss"]) == pytest.approx(math.log(4) - math.log(0.8), abs=1e-6)
    assert (float(sums["hits"]), float(sums["count"])) == (1.0, 2.0)
    assert zero_sums().keys() == sums.keys()


def test_evaluation_sums_by_document(tiny: ConfigDict) -> None:
    program = build_program(tiny, TaskSpec("language_model", 5, 6))
    params = program.init(3)["params"]
    rng = np.random.default_rng(7)
    batch = {"tokens": rng.integers(5, size=(4, 6)), "targets": rng.integers(5, size=(4, 6))}
    mask, document = rng.random((4, 6)) < 0.7, rng.integers(3, size=(4, 6))
    together = program.evaluate(params, zero_sums((3,)), batch | {"mask": mask, "document": document})
    for number in range(3):
        alone = program.evaluate(params, zero_sums((1,)), batch | {"mask": mask & (document == number)})
        for name, value in alone.items():
            assert float(together[name][number]) == pytest.approx(float(value[0]), rel=1e-6)
    twice = program.evaluate(params, together, batch | {"mask": mask, "document": document})
    np.testing.assert_allclose(twice["loss"], 2 * together["loss"], rtol=1e-6)


def test_rows_of_heads_are_means_over_real_tokens(tiny: ConfigDict, tmp_path: pathlib.Path) -> None:
    task = build_task(tiny)
    program = build_program(tiny, task.spec)
    params = program.init(3)["params"]
    row = head_row(task, program, params, 5)
    assert len(row) == 5 * 2  # statistics, heads
    batch = task.evaluations()["valid"].batches(5)[0]
    found = jax.jit(program.model(params).head_statistics)(jnp.asarray(batch["tokens"]))[0].entropy
    real = np.asarray(found)[:, 1][np.asarray(batch["mask"])]
    assert 0 < real.size < batch["mask"].size
    assert row["heads/entropy/0.1"] == pytest.approx(real.mean(), rel=1e-5)
    result = train(override(tiny, {"run.head_statistics": True}), tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "heads/distance/0.0" in row] == [4, 8, 12]
    assert not any(name.startswith("heads/") for name in result.metrics)


def test_only_kernels_are_decayed_whatever_their_rank() -> None:
    ours = {
        "model.position.name": "learned",
        "model.attention.use_bias": True,
        "model.attention.position.name": "relative",
        "model.mlp.use_bias": True,
        "model.norm": "layer_norm",
        "model.attention.add_bias_kv": True,
        "model.attention.sink": True,
        "model.d_model": 12,
        "model.num_layers": 1,
        "optimizer.rule.weight_decay": 0.5,
    }
    config = override(default_config(), ours)
    shapes = jax.eval_shape(build_program(config, TaskSpec("language_model", 7, 5)).init, 0)["params"]
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), shapes)
    optimizer = build_optimizer(config)

    @jax.jit
    def change(params: Any) -> Any:
        return optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)[0]

    changes = change(params)
    moved = {
        jax.tree_util.keystr(path, simple=True, separator="/"): bool((leaf != 0).any())
        for path, leaf in jax.tree_util.tree_leaves_with_path(changes)
    }
    assert {path for path, is_moved in moved.items() if is_moved} == {
        f"blocks/0/{name}/kernel"
        for name in (
            "attention/query",
            "attention/key",
            "attention/value",
            "attention/output",
            "mlp/hidden",
            "mlp/output",
        )
    }
    still = {path.rsplit("/", 1)[-1] for path, is_moved in moved.items() if not is_moved}
    assert {"bias", "scale", "embedding", "table", "position_parameter", "sink", "bias_key", "bias_value"} <= still
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a != 0).any()) == b, changes, decayed(params)))


@pytest.mark.parametrize(
    "name,expected",
    [
        ("constant", [1, 2, 3, 4, 4, 4, 4, 4]),
        ("linear", [1, 2, 3, 4, 4, 3.25, 2.5, 1.75]),
        ("cosine", [1, 2, 3, 4, 4, 1 + 3 * (1 + math.cos(math.pi / 4)) / 2, 2.5, 1 + 3 * (1 - math.sqrt(0.5)) / 2]),
        ("inverse_sqrt", [1, 2, 3, 4, 4, 4 * math.sqrt(4 / 5), 4 * math.sqrt(4 / 6), 4 * math.sqrt(4 / 7)]),
    ],
)
def test_schedules(name: str, expected: list[float]) -> None:
    changes: dict[str, Any] = {"optimizer.learning_rate": 4.0, "optimizer.warmup_steps": 4, "train.steps": 8}
    changes["optimizer.schedule.name"] = name
    if name in ("linear", "cosine"):
        changes["optimizer.schedule.final_fraction"] = 0.25
    schedule = build_schedule(override(default_config(), changes))
    np.testing.assert_allclose([schedule(n) for n in range(8)], expected, rtol=1e-6)


def test_clipping_bounds_the_whole_gradient() -> None:
    changes = {"optimizer.rule.name": "sgd", "optimizer.learning_rate": 1.0, "optimizer.warmup_steps": 0}
    config = override(default_config(), changes | {"optimizer.clip_norm": 1.0, "optimizer.schedule.name": "constant"})
    optimizer = build_optimizer(config)
    gradient = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
    change, _ = optimizer.update(gradient, optimizer.init(gradient), gradient)
    np.testing.assert_allclose([change["a"][0], change["b"][0]], [-0.6, -0.8], rtol=1e-6)


def test_parts_of_a_batch_give_the_update_of_the_whole(tiny: ConfigDict) -> None:
    quiet = override(tiny, {"model.dropout_rate": 0.0, "model.attention.dropout_rate": 0.0, "train.batch_size": 6})
    task = build_task(quiet)
    batch = task.train_batches(0, 6)[0]
    # Rows with unequal numbers of real tokens, one with none.
    batch["mask"] = batch["mask"] & (np.arange(6)[:, None] + np.arange(6) > 4) & (np.arange(6)[:, None] > 0)
    results = []
    for parts in (1, 2, 3):
        program = build_program(override(quiet, {"train.accumulate": parts}), task.spec)
        state, metrics = program.update(placed(program.init(1)), batch)
        results.append((state["params"], metrics["sums"]))
        counts = [int(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state["optimizer"]) if leaf.ndim == 0]
        assert set(counts) == {1}  # the schedule's step counts updates, not parts
    for other in results[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), results[0], other)


def test_an_update_that_is_not_finite_is_skipped_and_counted(tiny: ConfigDict) -> None:
    task = build_task(tiny)
    program = build_program(tiny, task.spec)
    state = placed(program.init(0))
    state["params"]["norm"]["scale"] = jnp.full_like(state["params"]["norm"]["scale"], jnp.nan)
    before = jax.tree.map(np.array, {name: state[name] for name in ("params", "optimizer")})
    state, metrics = program.update(state, task.train_batches(0, 6)[0])
    jax.tree.map(np.testing.assert_array_equal, before, {name: state[name] for name in before})
    assert int(state["step"]) == 1
    assert int(metrics["skipped"]) == int(metrics["skipped_in_a_row"]) == 1
    assert float(metrics["sums"]["count"]) == 0.0
    state["params"]["norm"]["scale"] = jnp.ones_like(state["params"]["norm"]["scale"])
    state, metrics = program.update(state, task.train_batches(0, 6)[1])
    assert (int(metrics["skipped"]), int(metrics["skipped_in_a_row"])) == (1, 0)


def test_a_run_that_diverges_says_so_and_stays_so(tiny: ConfigDict, tmp_path: pathlib.Path) -> None:
    def build(config: ConfigDict, spec: TaskSpec) -> Program:
        """The program with a parameter that is not a number, so that no update is finite."""
        program = build_program(config, spec)

        def init(seed: int) -> Any:
            state = program.init(seed)
            state["params"]["norm"]["scale"] *= jnp.nan
            return state

        return dataclasses.replace(program, init=init)

    result = train(tiny, tmp_path / "run", build=build)
    assert result.status == "diverged"
    assert result.step == 4  # the metrics of the third update are read when the fourth has begun
    assert result.message.startswith("diverged at step 3")
    assert "3 updates in a row was not finite; lower optimizer.learning_rate" in result.message
    assert json.loads((tmp_path / "run/result.json").read_text())["status"] == "diverged"
    assert train(tiny, tmp_path / "run") == result


def test_one_program_serves_every_seed_and_directory(tiny: ConfigDict) -> None:
    spec = build_task(tiny).spec
    program = build_program(tiny, spec)
    assert build_program(override(tiny, {"seed": 5, "run.profile_steps": 3}), spec) is program
    assert build_program(override(tiny, {"optimizer.learning_rate": 0.5}), spec) is not program


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"train.steps": 0}, r"train\.steps must be 1 or more, got 0"),
        ({"train.accumulate": 4}, r"train\.batch_size 6 must be a multiple of train\.accumulate 4"),
        ({"seed": -1}, r"seed must be 0 or more, got -1"),
        ({"seed": 2**31}, r"seed must be smaller than 2\^31 in size, got 2147483648"),
        ({"model.attention.num_heads": 3}, r"^model: .*in_features=8 .*num_heads=3"),
        ({"model.attention.dropout_rate": 1.5}, r"^model\.attention\.dropout_rate must be in \[0, 1\), got 1\.5"),
        ({"task.length": 7}, r"^task: task\.length must be even for copy, got 7"),
        ({"optimizer.clip_norm": -1.0}, r"optimizer\.clip_norm must be 0 or more, got -1\.0"),
        ({"model.attention.head_dim": 5}, r"^model: rotate: the head width must be even, got 5"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_written(
    changes: dict[str, Any], message: str, tiny: ConfigDict, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(override(tiny, changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


RETRIEVAL = {"task.name": "retrieval", "task.slots": 2, "task.items": 5, "task.width": 3, "task.evaluation_size": 13}


def test_the_look_up_model_is_updated_and_scored_exactly() -> None:
    config = override(default_config(), RETRIEVAL | {"model.d_model": 8, "model.attention.implementation": "reference"})
    task = build_task(config)
    program = build_program(config, task.spec)
    state, metrics = program.update(program.init(0), task.train_batches(0, 6)[0])
    assert float(metrics["sums"]["count"]) == 6.0
    row, _ = evaluation_row(task, program, state["params"], 7, every=True)
    held_out = task.evaluations()["test"].batches(13)[0]
    outputs = program.model(state["params"])(*(held_out[name] for name in ("ids", "values", "queries")))
    error = np.mean(np.square(np.asarray(outputs, np.float64) - held_out["targets"]), axis=(1, 2))
    assert row["test/nmse"] == pytest.approx(error.mean(), rel=1e-5)
    assert row["test/solved"] == np.mean(error < 0.05)
    assert row["valid/nmse"] != row["test/nmse"]


def test_the_look_up_model_refuses_what_it_does_not_read() -> None:
    config = override(default_config(), RETRIEVAL | {"model.norm": "layer_norm", "model.mlp.width": 9})
    with pytest.raises(ConfigError, match=r"retrieval task has no model\.norm, model\.mlp\.width"):
        build_program(config, build_task(config).spec)
