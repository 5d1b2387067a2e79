"""Every kind of attention that a config may name: causal, counted, trained, decoded or refused in one line."""

import functools
import json
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from ml_collections import ConfigDict

from mha_research import attention
from mha_research.analysis.restore import restore
from mha_research.config import FIELDS, ConfigError, from_json, override, to_json
from mha_research.config.attention import ATTENTION
from mha_research.factory.build import build_model, build_task
from mha_research.factory.kinds import MODULES
from mha_research.tasks import TaskSpec
from mha_research.training import check, dry_run, train
from mha_research.training.step import build_program
from tests.mha_research.attention.test_costs import products

WIDTH, LENGTH, SYMBOLS = 24, 11, 7
KIND, POSITION = "model.attention.kind", "model.attention.position.name"
CLASSES = {
    "multi_head": attention.MultiHeadAttention,
    "talking_heads": attention.TalkingHeadsAttention,
    "sigmoid": attention.SigmoidAttention,
    "shaw": attention.ShawAttention,
    "differential": attention.DifferentialAttention,
    "collaborative": attention.CollaborativeAttention,
    "performer": attention.PerformerAttention,
    "conv_value": attention.ConvValueAttention,
    "frame_difference": attention.FrameDifferenceAttention,
    "multi_scale": attention.MultiScaleAttention,
}
# Fields of a kind, each away from its default, and what the module then holds.
OWN: dict[str, dict[str, Any]] = {
    "sigmoid": {"logit_bias": -0.5},
    "shaw": {"max_distance": 2, "key_table": True, "value_table": False},
    "collaborative": {"shared_dim": 10},
    "performer": {"num_features": 13, "feature_kind": "hyperbolic", "orthogonal": False, "redraw_every": 3},
    "conv_value": {"kernel_size": 2},
    "frame_difference": {"difference": "replace"},
    "multi_scale": {"patch_sizes": (1, 3)},
}
SINK = "model.attention.sink"
NEEDED = {"shaw": {SINK: True}, "collaborative": {POSITION: "alibi", SINK: True}, "multi_scale": {POSITION: "none"}}
CANNOT_DECODE = ("conv_value", "frame_difference", "multi_scale")
IMPROBABLE = ("talking_heads", "sigmoid", "differential", "multi_scale")


def changed(tiny: ConfigDict, kind: str, changes: dict[str, Any] | None = None) -> ConfigDict:
    """`tiny` with the kind, and with nothing that a kind may refuse."""
    plain = {"model.attention.dropout_rate": 0.0, "model.attention.num_heads": 3, "model.d_model": WIDTH}
    return override(tiny, {**plain, KIND: kind, **NEEDED.get(kind, {}), **(changes or {})})


def own(kind: str) -> dict[str, Any]:
    return {f"model.attention.{name}": value for name, value in OWN.get(kind, {}).items()}


@functools.cache
def _model(config_json: str) -> Any:
    return build_model(from_json(config_json), TaskSpec("language_model", SYMBOLS, LENGTH), nnx.Rngs(0))


def model_of(config: ConfigDict) -> Any:
    return _model(to_json(config))


def logits(model: Any, tokens: Any) -> jax.Array:
    graphdef, state = nnx.split(model)
    return jax.jit(lambda state, tokens: nnx.merge(graphdef, state)(tokens))(state, jnp.asarray(tokens))


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(5).integers(0, SYMBOLS, (2, LENGTH))


def test_every_kind_has_a_module_and_every_module_a_kind_but_that_which_needs_domains() -> None:
    assert set(MODULES) == set(ATTENTION.kinds) == set(CLASSES)
    assert {kind: set(fields) for kind, fields in ATTENTION.kinds.items() if fields} == {
        kind: set(fields) for kind, fields in OWN.items()
    }
    exported = {name for name in attention.__all__ if name.endswith("Attention")}
    assert exported == {module.__name__ for module in CLASSES.values()}


@pytest.mark.parametrize("kind", CLASSES)
def test_a_kind_is_its_module_with_its_own_fields(tiny: ConfigDict, kind: str) -> None:
    config = check(changed(tiny, kind, own(kind)))
    assert from_json(to_json(config)) == config
    module = model_of(config).blocks[0].attention
    assert type(module) is CLASSES[kind]
    for name, value in OWN.get(kind, {}).items():
        if name == "kernel_size":
            assert module.value.conv.kernel_size == (value,)
            assert module.value.conv.padding == "CAUSAL"
        elif name.endswith("_table"):
            assert (getattr(module, name) is not None) == value
        elif name == "shared_dim":
            assert module.mixing.shape == (3, value)
        else:
            assert getattr(module, "kind" if name == "feature_kind" else name) == value


@pytest.mark.parametrize("kind", CLASSES)
def test_no_output_depends_on_a_later_token(tiny: ConfigDict, kind: str, tokens: np.ndarray) -> None:
    """To the bit, for each later token alone; and the next output does depend on it."""
    same = np.stack([tokens[0]] * LENGTH)
    others = same + np.eye(LENGTH, dtype=int) * ((same + 1) % SYMBOLS - same)
    graphdef, state = nnx.split(model_of(changed(tiny, kind, own(kind))))
    forward = jax.jit(lambda state, tokens: nnx.merge(graphdef, state)(tokens))
    reach = np.asarray(jnp.abs(forward(state, others) - forward(state, same)).max(-1))  # (changed token, output)
    np.testing.assert_array_equal(reach[np.tril_indices(LENGTH, -1)], 0)
    assert (np.diagonal(reach) > 0).all()
    assert (np.diagonal(reach, 1) > 0).all()  # the attention reads what is just before


@pytest.mark.parametrize("kind", CLASSES)
def test_flops_are_those_of_the_products_in_the_program(tiny: ConfigDict, kind: str) -> None:
    model = model_of(changed(tiny, kind, own(kind)))
    program = jax.make_jaxpr(lambda tokens: model(tokens))(jnp.zeros((1, LENGTH), jnp.int32))
    assert model.forward_flops(LENGTH) == 2 * products(program.jaxpr)


@pytest.mark.parametrize("kind", [kind for kind in CLASSES if kind != "multi_head"])  # of which: test_decoder.py
def test_decoding_is_the_forward_pass_or_refused(tiny: ConfigDict, kind: str, tokens: np.ndarray) -> None:
    """Token by token through a cache with room to spare, as a sample has it."""
    model = model_of(changed(tiny, kind, own(kind)))
    if kind in CANNOT_DECODE:
        with pytest.raises(ValueError, match="cannot decode"):
            model.decode(jnp.asarray(tokens), model.init_cache(2, LENGTH))
        return
    graphdef, state = nnx.split(model)
    decode = jax.jit(lambda state, tokens, cache: nnx.merge(graphdef, state).decode(tokens, cache))
    cache, pieces = model.init_cache(2, LENGTH + 4), []
    for part in np.split(tokens, LENGTH, axis=1):
        piece, cache = decode(state, part, cache)
        pieces.append(piece)
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), logits(model, tokens), atol=5e-6)


def test_the_bias_of_sigmoid_attention_is_that_of_the_trained_length(tiny: ConfigDict) -> None:
    assert model_of(changed(tiny, "sigmoid")).blocks[0].attention.logit_bias == -math.log(LENGTH)


def test_lambda_of_differential_attention_follows_the_layer(tiny: ConfigDict) -> None:
    """Ye et al. 2024: 0.8 - 0.6 exp(-0.3 (l - 1)), which is 0.2, 0.36 and 0.47 in the first three layers."""
    model = model_of(changed(tiny, "differential", {"model.num_layers": 3}))
    starts = [block.attention.lambda_start for block in model.blocks]
    np.testing.assert_allclose(starts, [0.2, 0.35551, 0.47071], atol=1e-5)


@pytest.mark.parametrize("kind", ["shaw", "collaborative", "performer", "conv_value"])
def test_head_statistics_are_those_of_the_probabilities(tiny: ConfigDict, kind: str, tokens: np.ndarray) -> None:
    graphdef, state = nnx.split(model_of(changed(tiny, kind, own(kind))))

    @jax.jit
    def looked_at(state: Any, tokens: jax.Array) -> Any:
        model = nnx.merge(graphdef, state)
        return model.attention_weights(tokens)[0], model.head_statistics(tokens)[0]

    weights, found = looked_at(state, jnp.asarray(tokens))
    p = np.asarray(weights, np.float64)
    query, key = np.indices((LENGTH, LENGTH))
    if SINK not in NEEDED.get(kind, {}):
        np.testing.assert_allclose(p.sum(-1), 1, atol=1e-5)
        logarithm = np.log(p, out=np.zeros_like(p), where=p > 0)
        np.testing.assert_allclose(found.entropy, -(p * logarithm).sum(-1), atol=1e-5)
    np.testing.assert_allclose(found.max_probability, p.max(-1), atol=1e-5)
    np.testing.assert_allclose(found.previous_mass, (p * (query == key + 1)).sum(-1), atol=1e-5)
    np.testing.assert_allclose(found.sink_mass, p[..., 0], atol=1e-5)


def test_patches_give_no_map_of_tokens(tiny: ConfigDict, tokens: np.ndarray) -> None:
    model = model_of(changed(tiny, "multi_scale", own("multi_scale")))
    with pytest.raises(ValueError, match=r"^MultiScaleAttention has no weight for each token$"):
        model.attention_weights(jnp.asarray(tokens))


@pytest.mark.parametrize("kind", IMPROBABLE)
def test_statistics_of_what_is_no_probability_are_refused_before_training(tiny: ConfigDict, kind: str) -> None:
    config = changed(tiny, kind, {"run.head_statistics": True})
    with pytest.raises(ConfigError, match=r"^run\.head_statistics: .*so its heads have no statistics$"):
        dry_run(config, build_task(config), update=False)


@pytest.fixture
def text(tiny: ConfigDict, tmp_path: pathlib.Path) -> dict[str, Any]:
    (tmp_path / "text.txt").write_text("to be or not to be " * 9)
    lacking = {"task.vocabulary_size": None, "task.evaluation_size": None}
    return {"task.name": "char_lm", "task.length": 8, "task.files": str(tmp_path / "*.txt"), **lacking}


@pytest.mark.parametrize("kind", CANNOT_DECODE)
def test_a_sample_of_what_cannot_decode_is_refused_before_training(
    tiny: ConfigDict, kind: str, text: dict[str, Any]
) -> None:
    config = changed(tiny, kind, text | {"task.segments": False, "run.sample_length": 5})
    with pytest.raises(ConfigError, match=r"^run\.sample_length: \w+ cannot decode: "):
        dry_run(check(config), build_task(config), update=False)


@pytest.mark.parametrize(
    "kind,changes,message",
    [
        ("performer", {POSITION: "alibi"}, f"{POSITION} must be 'none' or 'rotary' with {KIND} = 'performer', got 'a"),
        ("collaborative", {POSITION: "rotary"}, f"{POSITION} must be 'none' or 'alibi' or 'relative' with "),
        ("multi_scale", {POSITION: "rotary"}, f"{POSITION} must be 'none' with {KIND} = 'multi_scale', got 'rotary'"),
        ("conv_value", {"model.attention.value_init.name": "orthogonal"}, "value_init.name must be 'xavier_uniform'"),
        ("performer", {"model.attention.implementation": "blockwise"}, "implementation must be 'auto' or 'reference'"),
        (
            "multi_scale",
            {"model.attention.drop_head.name": "drop_head", "model.attention.drop_head.importance_power": 1.0},
            "drop_head.importance_power must be None or 0.0 with ",
        ),
        ("shaw", {"task.name": "retrieval", "task.length": None, "task.vocabulary_size": None}, "task.name must be "),
        ("multi_head", {"model.attention.num_features": 8}, f"num_features belongs to {KIND} = 'performer', but the k"),
        ("performer", {"model.attention.max_distance": 8}, f"max_distance belongs to {KIND} = 'shaw', but the kind is"),
        ("performer", {"model.attention.num_features": 0}, "num_features must be 1 or more, got 0"),
        ("multi_scale", {"model.attention.patch_sizes": (2, 0)}, "patch_sizes must be 1 or more, got 0"),
        ("performr", {}, "did you mean 'performer'?"),
    ],
)
def test_what_does_not_go_with_a_kind_is_one_line_that_names_the_field(
    tiny: ConfigDict, kind: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check(changed(tiny, kind, changes))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["performer", "conv_value", "frame_difference", "multi_scale"])
def test_packed_documents_are_refused_where_they_would_be_seen(
    tiny: ConfigDict, kind: str, text: dict[str, Any]
) -> None:
    """True is the default of the text task; other tasks pack nothing."""
    with pytest.raises(ConfigError, match=rf"^task\.segments must be False with {KIND} = '{kind}', got True: "):
        check(changed(tiny, kind, text))
    check(changed(tiny, kind, text | {"task.segments": False}))


@pytest.mark.parametrize(
    "kind,name,value",
    [
        ("performer", "dropout_rate", 0.3),
        ("performer", "softcap", 3.0),
        ("sigmoid", "sink", True),
        ("shaw", "add_bias_kv", True),
        ("differential", "normalize_qk", True),
        ("collaborative", "head_dim", 4),
        ("frame_difference", "packed", True),
        ("conv_value", "packed", True),
        ("talking_heads", "implementation", "blockwise"),
    ],
)
def test_a_choice_that_a_module_does_not_take_is_refused_before_training(
    tiny: ConfigDict, kind: str, name: str, value: Any
) -> None:
    config = changed(tiny, kind, {f"model.attention.{name}": value})
    with pytest.raises(ConfigError, match=rf"^model: {CLASSES[kind].__name__}.*{name}"):
        dry_run(config, build_task(config), update=False)


def test_random_features_are_of_the_seed_and_no_update_changes_them(tiny: ConfigDict, tmp_path: pathlib.Path) -> None:
    """Read back from its checkpoint too; and the parameters beside them are trained."""
    config = changed(tiny, "performer", {"model.attention.num_features": 5, "train.steps": 2, "train.accumulate": 1})
    program = build_program(config, build_task(config).spec)
    start, other = (program.init(seed)["params"]["blocks"][0]["attention"] for seed in (0, 1))
    assert start["features"].shape == (5, 8)
    assert not np.array_equal(start["features"], other["features"])
    assert program.parameters == build_program(changed(tiny, "multi_head"), build_task(config).spec).parameters
    result = train(config, tmp_path)
    assert result.status == "finished"
    after = restore(tmp_path).blocks[0].attention
    np.testing.assert_array_equal(after.features[...], start["features"])
    assert not np.array_equal(after.query.kernel[...], start["query"]["kernel"])


def test_features_that_are_drawn_anew_train(tiny: ConfigDict) -> None:
    """What is kept then is the data of a key, of integers, which have no gradient."""
    config = changed(tiny, "performer", own("performer"))
    task = build_task(config)
    state = jax.eval_shape(build_program(config, task.spec).init, 0)
    assert state["params"]["blocks"][0]["attention"]["features"].dtype == jnp.uint32
    dry_run(config, task)


def test_a_config_saved_before_there_were_kinds_is_the_same_experiment(tiny: ConfigDict) -> None:
    saved = tiny.to_dict()
    for name in ATTENTION.own():
        del saved["model"]["attention"][name]
    assert from_json(json.dumps(saved)) == tiny
    assert set(FIELDS) >= {f"model.attention.{name}" for name in ATTENTION.own()}


@pytest.mark.parametrize("kind", ["talking_heads", "sigmoid", "differential", "collaborative", "performer"])
def test_kinds_without_an_order_look_items_up(tiny: ConfigDict, kind: str) -> None:
    """The items are keys and values of a cross attention, which is not causal; its products are counted too."""
    task_fields = {"task.name": "retrieval", "task.length": None, "task.vocabulary_size": None, "task.slots": 2}
    unread = {"model.dropout_rate": 0.0, POSITION: "none"}
    config = check(changed(tiny, kind, task_fields | unread | own(kind)))
    task = build_task(config)
    dry_run(config, task, update=False)
    model = build_model(config, task.spec, nnx.Rngs(0))
    batch = task.train_batches(0, 1)[0]
    program = jax.make_jaxpr(lambda *batch: model(*batch))(batch["ids"], batch["values"], batch["queries"])
    assert model.forward_flops(task.spec.length) == 2 * products(program.jaxpr)
