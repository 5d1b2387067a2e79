"""Weights from elsewhere: Flax's and PyTorch's multi-head attention, safetensors files."""

from mha_research.interop.attention import from_linen, from_nnx, from_torch, read_safetensors

__all__ = ["from_linen", "from_nnx", "from_torch", "read_safetensors"]
