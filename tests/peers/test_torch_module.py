"""`from_torch` beside `torch.nn.MultiheadAttention`: outputs, weights, masks, widths, bias key, zero attention."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from mha_kernels import CausalMask
from mha_research.interop import from_torch

B, L, S, D, H = 2, 5, 7, 12, 4


def pair(**choices: object) -> tuple:
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(D, H, batch_first=True, **choices).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    ours = from_torch(
        theirs.state_dict(), H, add_zero_attention=bool(choices.get("add_zero_attn")), implementation="reference"
    )
    return theirs, ours


def inputs(key_width: int = D, value_width: int = D) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = ((B, L, D), (B, S, key_width), (B, S, value_width))
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"bias": False},
        {"kdim": 11, "vdim": 13},
        {"add_bias_kv": True},
        {"add_zero_attn": True},
        {"add_bias_kv": True, "add_zero_attn": True, "kdim": 11, "vdim": 13},
    ],
    ids=str,
)
@pytest.mark.parametrize("mask", ["none", "boolean", "additive", "per head", "padding"])
def test_output_and_weights(choices: dict, mask: str) -> None:
    theirs, ours = pair(**choices)
    arrays = inputs(choices.get("kdim", D), choices.get("vdim", D))
    rng = np.random.default_rng(1)
    keep = rng.random((L, S)) < 0.6
    keep[:, 0] = True
    each = rng.random((B, H, L, S)) < 0.6
    each[..., 0] = True
    bias = rng.standard_normal((L, S)).astype(np.float32)
    real = np.arange(S)[None] < np.array([[S], [3]])
    their_call, our_call = {
        "none": ({}, {}),
        "boolean": ({"attn_mask": torch.tensor(~keep)}, {"mask": keep}),
        "additive": ({"attn_mask": torch.tensor(bias)}, {"bias": bias}),
        "per head": ({"attn_mask": torch.tensor(~each.reshape(B * H, L, S))}, {"mask": each}),
        "padding": ({"key_padding_mask": torch.tensor(~real)}, {"key_padding_mask": real}),
    }[mask]
    with torch.no_grad():
        expected, weights = theirs(*map(torch.tensor, arrays), average_attn_weights=False, **their_call)
    output, returned = ours(*map(jnp.asarray, arrays), return_weights=True, **our_call)
    np.testing.assert_allclose(output, expected, rtol=0, atol=3e-6)
    np.testing.assert_allclose(returned, weights[..., :S], rtol=0, atol=3e-6)


def test_causal_self_attention_and_averaged_weights() -> None:
    theirs, ours = pair()
    x = inputs()[0]
    causal = torch.nn.Transformer.generate_square_subsequent_mask(L)
    with torch.no_grad():
        expected, weights = theirs(*[torch.tensor(x)] * 3, attn_mask=causal, is_causal=True)
    output, returned = ours(jnp.asarray(x), mask=CausalMask(), return_weights="average")
    np.testing.assert_allclose(output, expected, rtol=0, atol=3e-6)
    np.testing.assert_allclose(returned, weights, rtol=0, atol=3e-6)
