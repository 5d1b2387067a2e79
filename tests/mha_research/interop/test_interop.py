"""Parameters of Flax's modules give Flax's output; PyTorch's names and shapes are read without torch."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.flax import save_file

from mha_research.interop import from_linen, from_nnx, from_torch, read_safetensors
from tests.mha_research.attention import oracle
from tests.mha_research.attention.helpers import close, normal, run

B, L, K, D, H = 2, 5, 7, 12, 4
NOISE = jax.nn.initializers.normal(0.3)


@pytest.mark.parametrize(
    "choices", [{}, {"num_kv_heads": 2, "normalize_qk": True}, {"use_bias": False, "out_features": 5}], ids=str
)
def test_nnx_parameters_give_the_output_of_nnx(choices):
    theirs = nnx.MultiHeadAttention(H, D, bias_init=NOISE, decode=False, rngs=nnx.Rngs(0), **choices)
    if "normalize_qk" in choices:
        theirs.query_ln.scale[...] += normal(2, 3)
    ours = from_nnx(theirs, implementation="reference")
    x, mask = normal(1, B, L, D), np.tril(np.ones((L, L), bool))[None, None]
    close(run(ours, x), run(theirs, x))
    close(run(ours, x, mask=mask), run(theirs, x, mask=jnp.broadcast_to(mask, (B, H, L, L))))


def test_linen_parameters_give_the_output_of_linen_with_other_input_widths():
    theirs = nn.MultiHeadDotProductAttention(H, qkv_features=20, out_features=9, bias_init=NOISE, normalize_qk=True)
    query, key, value = normal(1, B, L, D), normal(2, B, K, 11), normal(3, B, K, 13)
    variables = theirs.init(jax.random.key(0), query, key, value)
    ours = from_linen(variables["params"], implementation="reference")
    assert (ours.in_features, ours.key_features, ours.value_features, ours.out_features) == (12, 11, 13, 9)
    close(run(ours, query, key, value), theirs.apply(variables, query, key, value))


def torch_tensors(packed):
    widths = zip("qkv", (12, 5, 7))
    shapes = {"in_proj_weight": (36, 12)} if packed else {f"{n}_proj_weight": (12, w) for n, w in widths}
    shapes |= {"in_proj_bias": (36,), "bias_k": (1, 1, 12), "bias_v": (1, 1, 12)}
    shapes |= {"out_proj.weight": (12, 12), "out_proj.bias": (12,)}
    return {name: normal(i, *shape) for i, (name, shape) in enumerate(shapes.items())}


@pytest.mark.parametrize("packed", [True, False])
def test_torch_tensors_of_a_file_by_the_definition(packed, tmp_path):
    tensors, prefix, path = torch_tensors(packed), "encoder.attn.", tmp_path / "model.safetensors"
    save_file({prefix + name: x for name, x in tensors.items()}, path)
    ours = from_torch(read_safetensors(path), H, prefix=prefix, add_zero_attention=True)
    t = {name: np.asarray(x, np.float64) for name, x in tensors.items()}
    inputs = [normal(9, B, L, 12)] + [normal(8, B, K, 12 if packed else w) for w in (5, 7)]
    matrices = np.split(t["in_proj_weight"], 3) if packed else [t[f"{n}_proj_weight"] for n in "qkv"]
    biases = np.split(t["in_proj_bias"], 3)
    flat = [np.asarray(x, np.float64) @ m.T + b for x, m, b in zip(inputs, matrices, biases)]
    extra = [None, t["bias_k"], t["bias_v"]]
    flat = [x if e is None else np.concatenate([x, np.repeat(e, B, 0)], 1) for x, e in zip(flat, extra)]
    out, _ = oracle.heads(*(x.reshape(B, -1, H, 3) for x in flat), 3**-0.5, sink=np.zeros(H))
    close(run(ours, *inputs), out.reshape(B, L, 12) @ t["out_proj.weight"].T + t["out_proj.bias"], 2e-5)


def test_what_does_not_fit_is_named():
    tensors = torch_tensors(True)
    for change, words in (
        ({"in_proj_weight": normal(0, 24, 12)}, r"in_proj_weight must be \(36, 12\), got \(24, 12\)"),
        ({"ln.weight": normal(0, 3)}, r"unknown: \['ln.weight'\]"),
        ({"in_proj_weight": None}, r"missing: \['k_proj_weight'"),
        ({"bias_v": None}, "bias_v"),
    ):
        changed = {name: x for name, x in {**tensors, **change}.items() if x is not None}
        with pytest.raises(ValueError, match=words):
            from_torch(changed, H)
    with pytest.raises(ValueError, match="num_heads=5"):
        from_torch(tensors, 5)
    theirs = nnx.MultiHeadAttention(H, D, decode=False, rngs=nnx.Rngs(0))
    state = nnx.to_pure_dict(nnx.state(theirs, nnx.Param))
    with pytest.raises(ValueError, match=r"missing: \['out'\]"):
        from_linen({name: x for name, x in state.items() if name != "out"})
    state["key"]["bias"] = jnp.zeros((H, 2))
    with pytest.raises(ValueError, match=r"bias of key must be \(4, 3\), got \(4, 2\)"):
        from_linen(state)


@pytest.mark.parametrize("prefix", ["from_linen", "from_torch", "from_nnx", "read_safetensors"])
def test_each_reader_names_what_it_cannot_read(prefix, tmp_path):
    tensors, junk = torch_tensors(True), tmp_path / "junk"
    junk.write_bytes(b"no safetensors")
    state = nnx.to_pure_dict(nnx.state(nnx.MultiHeadAttention(H, D, decode=False, rngs=nnx.Rngs(0)), nnx.Param))
    ones, integers = {"scale": jnp.ones(3)}, jax.tree.map(lambda x: jnp.ones(x.shape, int), state)
    cases = {
        "from_linen": [
            (lambda: from_linen(None), TypeError, "parameters must be a Mapping, got None"),
            (lambda: from_linen({**state, "key": 3}), TypeError, "key must be a Mapping, got 3"),
            (lambda: from_linen({**state, "query_ln": ones}), ValueError, r"missing: \['key_ln'\]"),
            (lambda: from_linen({**state, "query_ln": ones, "key_ln": {}}), ValueError, r"key_ln: .*\['scale'\]"),
            (lambda: from_linen({**state, "out": {"kernel": "a"}}), TypeError, "kernel of out is a str"),
            (lambda: from_linen(integers), TypeError, "parameters have dtype int32; expected floats"),
            (lambda: from_linen(state, packed=True), ValueError, r"the parameters decide on \['packed'\]"),
        ],
        "from_torch": [
            (lambda: from_torch([], H), TypeError, r"tensors must be a Mapping, got \[\]"),
            (lambda: from_torch(tensors, 4.0), TypeError, "num_heads must be an integer, got 4.0"),
            (
                lambda: from_torch({**tensors, "in_proj_bias": np.zeros(33)}, H),
                ValueError,
                r"in_proj_bias must be \(36,\)",
            ),
            (
                lambda: from_torch({**tensors, "bias_k": np.zeros((1, 1, 9))}, H),
                ValueError,
                r"bias_k must be \(1, 1, 12\)",
            ),
            (lambda: from_torch({**tensors, "in_proj_weight": "a"}, H), TypeError, "in_proj_weight is a ndarray"),
            (
                lambda: from_torch({**tensors, "out_proj.weight": np.zeros((12, 9))}, H),
                ValueError,
                r"out_proj.weight must be \(12, 12\), got \(12, 9\)",
            ),
        ],
        "from_nnx": [(lambda: from_nnx("a"), TypeError, "module must be a MultiHeadAttention, got 'a'")],
        "read_safetensors": [
            (lambda: read_safetensors(tmp_path / "none"), FileNotFoundError, "there is no file .*none"),
            (lambda: read_safetensors(tmp_path), FileNotFoundError, "there is no file"),
            (lambda: read_safetensors(junk), ValueError, "junk' is no safetensors file"),
        ],
    }
    for attempt, error, message in cases[prefix]:
        with pytest.raises(error, match=message):
            attempt()


def test_parameters_of_two_types_keep_the_wider():
    state = nnx.to_pure_dict(nnx.state(nnx.MultiHeadAttention(H, D, decode=False, rngs=nnx.Rngs(0)), nnx.Param))
    state["query"] = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state["query"])
    np.testing.assert_array_equal(from_linen(state).key.kernel[...], state["key"]["kernel"])
