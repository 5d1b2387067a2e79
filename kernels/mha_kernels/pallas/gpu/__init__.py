"""The Mosaic kernel for Hopper GPUs: registers and pipelining, operands, forward and backward passes."""
