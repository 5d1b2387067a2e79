"""The TPU kernel: operands, forward and backward passes."""
