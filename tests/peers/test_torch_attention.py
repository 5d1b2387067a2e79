"""The same numbers and gradients as PyTorch's attention, in float64. Run by scripts/peers, which installs torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from mha_kernels import Blockwise, CausalMask, attention

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


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("implementation", ["reference", Blockwise(2, 3)], ids=str)
def test_masks_that_leave_a_query_without_keys(additive: bool, implementation: object, x64: None) -> None:
    """Boolean and additive (-inf) masks mean the same, here and in PyTorch: a row without keys is zero, not NaN."""
    keep = np.random.default_rng(2).random((B, H, Q, K)) < 0.5
    keep[0, :, 1] = False
    planes = np.where(keep, 0.0, -np.inf)
    inputs = arrays(3)
    expected, expected_gradients = torch_attention(inputs, attn_mask=torch.tensor(planes if additive else keep))
    given = {"bias": jnp.asarray(planes)} if additive else {"mask": jnp.asarray(keep)}

    @jax.jit
    def run(*x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        output, pull_back = jax.vjp(lambda *x: attention(*x, implementation=implementation, **given), *x)
        return output, pull_back(2 * output)

    output, gradients = run(*map(jnp.asarray, inputs))
    assert (output[0, 1] == 0).all()
    np.testing.assert_allclose(output, expected, rtol=0, atol=1e-13)
    for ours, theirs in zip(gradients, expected_gradients):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
