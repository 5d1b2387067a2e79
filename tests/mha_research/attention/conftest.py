"""The fixture that runs a test in both of JAX's default types."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(params=["float32", "float64"])
def each_precision(request: pytest.FixtureRequest) -> Iterator[None]:
    """float32, then float64, as the default of the whole test; see `helpers`."""
    with jax.enable_x64(request.param == "float64"):
        yield
