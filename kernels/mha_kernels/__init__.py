"""The attention algebra: one definition of every variant, run by every implementation."""
