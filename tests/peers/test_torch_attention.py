"""The same numbers and gradients as PyTorch's attention, in float64. Run by scripts/peers, which installs torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from mha_kernels import CausalMask, attention

B, Q, K, H, G, E, V = 2, 5, 7, 6, 3, 11, 13


def arrays(seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in ((B, Q, H, E), (B, K, G, E), (B, K, G, V))]


def torch_attention(inputs: list[np.ndarray], **options: object) -> tuple[np.ndarray, list[np.ndarray]]:
    """Output in our layout (B, Q, H, V), and the gradients of the sum of its squares."""
    tensors = [torch.tensor(array, requires_grad=True) for array in inputs]
    output = torch.nn.functional.scaled_dot_product_attention(
        *(tensor.transpose(1, 2) for tensor in tensors), enable_gqa=True, **options
    ).transpose(1, 2)
    (output**2).sum().backward()
    return output.detach().numpy(), [tensor.grad.numpy() for tensor in tensors]


@pytest.mark.parametrize("case", ["full", "causal", "mask", "bias"])
def test_output_and_gradients(case: str, x64: None) -> None:
    rng = np.random.default_rng(1)
    keep = rng.random((B, 1, Q, K)) < 0.6
    keep[..., 0] = True
    bias = rng.standard_normal((1, H, Q, K))
    theirs, ours = {
        "full": ({}, {}),
        "causal": ({"is_causal": True}, {"mask": CausalMask()}),
        "mask": ({"attn_mask": torch.tensor(keep)}, {"mask": jnp.asarray(keep)}),
        "bias": ({"attn_mask": torch.tensor(bias)}, {"bias": jnp.asarray(bias)}),
    }[case]
    inputs = arrays()
    expected, expected_gradients = torch_attention(inputs, **theirs)
    output = attention(*map(jnp.asarray, inputs), **ours)
    gradients = jax.grad(lambda *x: (attention(*x, **ours) ** 2).sum(), argnums=(0, 1, 2))(*map(jnp.asarray, inputs))
    np.testing.assert_allclose(output, expected, rtol=0, atol=1e-13)
    for ours_, theirs_ in zip(gradients, expected_gradients):
        np.testing.assert_allclose(ours_, theirs_, rtol=0, atol=1e-12)
