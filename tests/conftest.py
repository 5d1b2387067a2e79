"""Settings that hold for every test: CPU, strict shapes, float32 by default, reproducible property tests."""

import os
from collections.abc import Iterator

# Before jax is imported. A run on an accelerator says so itself (JAX_PLATFORMS=cuda scripts/test ...).
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")

# A first call compiles, so a deadline would measure XLA; few examples for the same reason.
hypothesis.settings.register_profile("dev", deadline=None, max_examples=25)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=25, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.fixture
def x64() -> Iterator[None]:
    """Float64 inside one test. Everywhere else JAX keeps its default, so that float32 paths are what is tested."""
    with jax.enable_x64(True):
        yield
