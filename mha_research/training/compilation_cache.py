"""Compiled programs kept between processes."""

import os
from pathlib import Path

import jax


def use_compilation_cache() -> None:
    """JAX keeps what it compiles in the user's cache folder, unless JAX_COMPILATION_CACHE_DIR says otherwise."""
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mha_research" / "jax"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
