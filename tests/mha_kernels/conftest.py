"""The native implementation, compiled once into pytest's own cache folder."""

from pathlib import Path

import pytest

from mha_kernels.native import library


@pytest.fixture(scope="session")
def native_cache(pytestconfig: pytest.Config) -> Path:
    """A cache folder that holds the compiled library. Skips where no C++ compiler is."""
    if library.compiler() is None:
        pytest.skip("no C++ compiler is found, which the native implementation is built with: apt-get install g++")
    with pytest.MonkeyPatch.context() as patch:
        folder = Path(pytestconfig.cache.mkdir("native")) if pytestconfig.cache else Path("build/native")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        library.build()
    return folder


@pytest.fixture
def native(native_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the native implementation one that is built, as after `python -m mha_kernels.native`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(native_cache))


@pytest.fixture
def no_native(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes it one that is not, whatever the user of this machine has built."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
