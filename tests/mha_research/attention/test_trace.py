"""The trace of a call: the output unchanged, every part consistent with it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mha_kernels import CausalMask
from mha_research import (
    Alibi,
    ConvValueAttention,
    MultiHeadAttention,
    Rotary,
    TalkingHeadsAttention,
    attention,
    trace_attention,
)
from tests.mha_research.attention.helpers import build, close, double, normal, run

B, L, D, H = 2, 5, 16, 4
SIZES = {"B": B, "Q": L, "K": L, "H": H, "G": 2, "D": D, "E": 4, "V": 4}


@pytest.mark.parametrize(
    "position, each_precision",
    [(Rotary(), "float32"), (Alibi(slopes=(0.3, 0.2, 0.1, 0.0)), "float64")],
    ids=str,
    indirect=["each_precision"],
)
@pytest.mark.usefixtures("each_precision")
def test_a_trace_adds_up_and_leaves_the_output_alone(position):
    m, x = build(D, H, 2, position=position, gate_output=True), normal(1, B, L, D)
    call = {"mask": CausalMask(), "head_gate": jnp.array([1.0, 0.0, 2.0, 1.0])}
    output, trace = jax.jit(lambda x: trace_attention(m, x, **call))(x)
    np.testing.assert_array_equal(output, run(m, x, **call))
    for part in trace.values():
        assert part.array.shape == tuple(SIZES[axis] for axis in part.axes)
    arrays = {name: np.asarray(traced.array, np.float64) for name, traced in trace.items()}
    close(arrays["contributions"].sum(2) + double(m.output.bias), output, 1e-5)
    scores = np.exp(arrays["scores"])
    close(scores / scores.sum(-1, keepdims=True), arrays["probabilities"], 1e-6)
    mixed = np.einsum("bhqk,bkhv->bqhv", arrays["probabilities"], np.repeat(arrays["value"], 2, 2))
    close(arrays["heads"], mixed * np.asarray(call["head_gate"])[:, None], 1e-5)
    close(arrays["contribution_norm"], np.linalg.norm(arrays["contributions"], axis=-1), 1e-5)
    assert not arrays["head_norm"][:, :, 1].any()


def test_variants_with_their_own_inputs_have_no_trace():
    assert "scores" in trace_attention(build(D, H, kind=TalkingHeadsAttention), normal(1, B, L, D))[1]
    with pytest.raises(TypeError, match="ConvValueAttention"):
        trace_attention(ConvValueAttention(D, H, rngs=nnx.Rngs(0)), normal(1, B, L, D))
    with pytest.raises(ValueError, match="return_weights"):
        trace_attention(MultiHeadAttention(D, H, rngs=nnx.Rngs(0)), normal(1, B, L, D), return_weights=True)


def test_everything_exported_exists():
    assert all(hasattr(attention, name) for name in attention.__all__)
