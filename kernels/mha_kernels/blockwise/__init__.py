"""Tiles in pure JAX: the driver "blockwise", its grid and loops, and the Gram matrix of heads."""

from mha_kernels.blockwise.driver import Blockwise

__all__ = ["Blockwise"]
