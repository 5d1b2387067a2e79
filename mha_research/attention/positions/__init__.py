"""Positions: encodings as plain functions, and the schemes that an attention module takes as values."""

from mha_research.attention.positions.encodings import (
    Learned,
    log_time,
    rotate,
    sinusoidal,
    sinusoidal_at,
    t5_bucket,
)

__all__ = ["Learned", "log_time", "rotate", "sinusoidal", "sinusoidal_at", "t5_bucket"]
