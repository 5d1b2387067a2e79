"""Code from outside: `file.py:Name` and `package.module:Name`, the files behind them, and what they import beside them.

A name in a config file or on a command line is resolved once, and held with its whole path from then on; with a run it
is written down by the file's name alone, and a copy of the file is kept. A file is loaded under a name that holds the
hash of what it says, so that two versions of it live side by side in one process.
"""

import ast
import contextlib
import contextvars
import functools
import hashlib
import importlib
import importlib.util
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any

from mha_research.config import trust
from mha_research.config.schema import ConfigError

_LOADING = threading.RLock()
_FOLDERS: contextvars.ContextVar[tuple[Path, ...]] = contextvars.ContextVar("folders", default=())


def is_outside(name: Any) -> bool:
    """True for `file.py:Name` and `package.module:Name`."""
    return isinstance(name, str) and ":" in name


@contextlib.contextmanager
def looking_in(*folders: str | Path) -> Iterator[None]:
    """Names are resolved in these folders, in this order, while the context lasts; else in the working directory."""
    token = _FOLDERS.set(tuple(map(Path, folders)))
    try:
        yield
    finally:
        _FOLDERS.reset(token)


def resolve(name: str) -> str:
    """The name with the whole path of its file. Who calls it has named the code, which is trusted from now on.

    Raises:
        ConfigError: for a file that is in none of the folders.
    """
    where, _, attribute = name.rpartition(":")
    if is_file(name):
        name = f"{_find(where)}:{attribute}"
    trust.remember(fingerprints([name]))
    return name


def resolve_if_relative(name: str) -> str:
    """As `resolve`; a name that holds a whole path already, which may come from data, is not trusted for that."""
    return name if is_file(name) and PurePath(name.rpartition(":")[0]).is_absolute() else resolve(name)


def portable(name: Any) -> Any:
    """The name as it is written down with a run: without the folder of its file. Other values as they are."""
    if not (is_outside(name) and is_file(name)):
        return name
    where, _, attribute = name.rpartition(":")
    return f"{PurePath(where).name}:{attribute}"


def kept_in(folder: Path, name: str) -> str:
    """What `portable` made, with the path of the copy in a folder."""
    return str(folder.resolve() / portable(name)) if is_file(name) else name


def look_up(name: str) -> Any:
    """The class or function behind a resolved name.

    Raises:
        ConfigError: naming the text, for a file or module that is not there or does not run, for a name that it lacks
            or that cannot be called, and for code that was read from a run's directory and nobody here has named.
    """
    where, _, attribute = name.rpartition(":")
    if not where or not attribute.isidentifier():
        raise ConfigError(f"{name!r} is no FILE.py:NAME or PACKAGE.MODULE:NAME")
    if not trust.is_trusted(fingerprints([name])):
        raise ConfigError(
            f"{name!r} comes from a run's directory, and running it runs code that you have not named yourself; "
            "look at it, then pass --trust_sources, or trust_sources=True"
        )
    module = load_file(Path(where)) if is_file(name) else _import(where, name)
    found = getattr(module, attribute, None)
    if not callable(found):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(f"{name!r}: {where} has no class or function {attribute!r}; it has {', '.join(known)}")
    return found


def is_file(name: str) -> bool:
    """True for `file.py:Name`, False for `package.module:Name`."""
    return name.rpartition(":")[0].endswith(".py")


def files(names: Iterable[str]) -> dict[str, Path]:
    """Every file behind resolved names, by the name under which a run keeps it: those named, and what they import.

    Raises:
        ConfigError: for a file that is missing, or for two different ones that would be kept under one name.
    """
    found: dict[str, Path] = {}
    for name in filter(is_file, names):
        file = Path(name.rpartition(":")[0])
        for path in (file, *_imported_beside(file)):
            other = found.setdefault(path.name, path)
            if other != path and other.read_bytes() != path.read_bytes():
                raise ConfigError(f"{other} and {path} would be kept under one name; rename one")
    return found


def fingerprints(names: Iterable[str]) -> tuple[str, ...]:
    """SHA-256 of every file behind the names, and of the name itself where it is that of a module."""
    names = list(names)
    texts = [path.read_bytes() for path in files(names).values()]
    texts += [name.encode() for name in names if not is_file(name)]
    return tuple(hashlib.sha256(text).hexdigest() for text in texts)


def load_file(path: Path) -> ModuleType:
    """The file as a module; loaded once as long as neither it nor a file beside it that it imports changes.

    Raises:
        ConfigError: one line, with the place in the file, where it does not run.
    """
    with _LOADING:
        beside = _imported_beside(path)
        said = b"\0".join(file.read_bytes() for file in (path, *beside))
        return _load(path, hashlib.sha256(said).hexdigest()[:16], beside)


def error_in_file(file: Path, error: BaseException, said: str = "") -> ConfigError:
    """One line that says where in the user's file it went wrong, and what, which is the error unless `said`."""
    lines: list[int] = []
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename in (str(file), str(file.absolute())):
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    lines += [error.lineno] if isinstance(error, SyntaxError) and error.lineno else []
    where = f"{file}, line {lines[-1]}" if lines else str(file)
    return ConfigError(f"{where}: {said or f'{type(error).__name__}: ' + ' '.join(str(error).split())}")


def _find(file: str) -> Path:
    """The file in the first folder that has it."""
    folders = _FOLDERS.get() or (Path.cwd(),)
    for candidate in (folder / file for folder in folders):
        if candidate.is_file():
            return candidate.resolve()
    raise ConfigError(f"there is no file {file!r} in {' or '.join(dict.fromkeys(map(str, folders)))}")


@functools.lru_cache(maxsize=256)
def _load(path: Path, digest: str, beside: tuple[Path, ...]) -> ModuleType:
    name = f"_source_{digest}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with _importable({file.stem: load_file(file) for file in beside}):
        sys.modules[name] = module  # dataclasses look their module up
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[name]
            raise error_in_file(path, error) from error
    return module


@contextlib.contextmanager
def _importable(modules: dict[str, ModuleType]) -> Iterator[None]:
    """`import name` gives these while the context lasts."""
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _imported_beside(path: Path, seen: frozenset[Path] = frozenset()) -> tuple[Path, ...]:
    """The files of the same folder that a file imports, and those that they import in turn.

    Raises:
        ConfigError: for such an import inside a function, which would run when nobody knows any more where it points.
    """
    try:
        tree = ast.parse(path.read_text(encoding="utf8"))
    except (OSError, SyntaxError, ValueError) as error:
        raise error_in_file(path, error) from error
    inside = {id(node) for function in ast.walk(tree) if _is_function(function) for node in ast.walk(function)}
    found: list[Path] = []
    for node in ast.walk(tree):
        for name in _imported_names(node):
            file = path.with_name(f"{name}.py")
            if name in sys.stdlib_module_names or not file.is_file() or file in (path, *seen):
                continue
            if id(node) in inside:
                line = getattr(node, "lineno", 0)
                raise ConfigError(f"{path}, line {line}: import {name} at the top of the file, not in a function")
            found.append(file)
    deeper = [other for file in found for other in _imported_beside(file, seen | {path, *found})]
    return tuple(dict.fromkeys([*found, *deeper]))


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))


def _imported_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.split(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module.split(".")[0]]
    return []


def _import(module: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{name!r}: {' '.join(str(error).split())}") from error
