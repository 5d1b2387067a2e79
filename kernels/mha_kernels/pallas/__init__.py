"""Kernels in Pallas: what both accelerators share, and a room for each."""
