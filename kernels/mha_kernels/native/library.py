"""Compiling attention.cc for this machine, and finding what was compiled."""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax

HERE = Path(__file__).parent
SOURCES = ("attention.cc", "problem.h", "scores.h", "product.h")
FLAGS = (
    *("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared"),
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
)
NOT_BUILT = "it is not built here; `python -m mha_kernels.native` compiles it"


def path() -> Path:
    """Where the library for these sources, this JAX and this processor lies: in the user's cache directory.

    Raises RuntimeError where there is no home directory, and OSError where the sources cannot be read.
    """
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "mha_kernels" / f"native-{_digest()}.so"


@functools.cache
def _digest() -> str:
    digest = hashlib.sha256("\n".join([jax.__version__, *FLAGS, _processor()]).encode())
    for name in SOURCES:
        digest.update((HERE / name).read_bytes())
    return digest.hexdigest()[:16]


def _checksum(library: Path) -> Path:
    """The file with the checksum of a library: loading a damaged one would end the process."""
    return library.with_suffix(".sha256")


def _processor() -> str:
    """What the compiler's -march=native depends on: a home directory may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.system()} {platform.machine()} {features}"


def compiler() -> str | None:
    """The C++ compiler: what the variable CXX names, else the first that is found."""
    return os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)


def build() -> Path:
    """Compiles the library, unless it is there and whole, and returns its path.

    Raises:
        RuntimeError: no C++ compiler is found (CXX names another one, CXXFLAGS adds to what it is told), or it fails;
            its message is in the error.
        OSError: the cache directory cannot be written.
    """
    target = path()
    if _is_whole(target):
        return target
    chosen = compiler()
    if chosen is None:
        raise RuntimeError("no C++ compiler is found: install g++ or clang, or name one in the variable CXX")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        made = Path(directory) / target.name
        flags = (*FLAGS, *shlex.split(os.environ.get("CXXFLAGS", "")))
        command = [
            *shlex.split(chosen),
            *flags,
            f"-isystem{jax.ffi.include_dir()}",
            str(HERE / SOURCES[0]),
            "-o",
            str(made),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            raise RuntimeError(f"{chosen} does not run: {error}") from error
        if done.returncode != 0:
            raise RuntimeError(f"{chosen} failed with status {done.returncode}:\n{done.stderr.strip()}")
        checksum = _checksum(made)
        checksum.write_text(hashlib.sha256(made.read_bytes()).hexdigest())
        made.replace(target)  # at once: another process never sees half of it
        checksum.replace(_checksum(target))
    return target


def _is_whole(library: Path) -> bool:
    try:
        return hashlib.sha256(library.read_bytes()).hexdigest() == _checksum(library).read_text()
    except OSError:
        return False


def is_built() -> bool:
    """Whether this machine has the library, or what is left of it."""
    try:
        return _checksum(path()).exists()
    except (OSError, RuntimeError):  # no home directory, or none that may be read
        return False


def reason_not_loaded() -> str | None:
    """None once the library is loaded and known to XLA; else why it is not."""
    return _load(path()) if is_built() else NOT_BUILT


@functools.cache
def _load(library: Path) -> str | None:
    if not _is_whole(library):
        return f"{library} is damaged; `python -m mha_kernels.native` compiles it again, for new processes"
    try:
        functions = ctypes.CDLL(str(library))
        for name in ("mha_forward", "mha_backward"):
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(functions, name)), platform="cpu")
    except (OSError, AttributeError, jax.errors.JaxRuntimeError) as error:
        return f"its library cannot be loaded: {error}"
    return None
