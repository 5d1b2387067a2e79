"""From a config file and overrides to one checked config, and from a choice to its object."""

import difflib
import importlib.util
import re
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from mha_research.config.default import FIELDS
from mha_research.config.schema import ConfigError, parse, unknown
from mha_research.config.tree import assign, flat, from_values, validate


def load_config(file: str | Path, overrides: Mapping[str, Any] | None = None) -> ConfigDict:
    """`get_config()` of the Python file, with the overrides applied, checked and locked.

    Overrides map dotted paths (`model.attention.num_heads`) to values, or to text as a command line gives it.
    Raises ConfigError, whose message is one line, for a file, a field or a value that is wrong.
    """
    return override(call(file, load_module(file), "get_config"), overrides or {})


def override(config: ConfigDict, overrides: Mapping[str, Any]) -> ConfigDict:
    """A changed, checked and locked copy of the config; text is parsed to the type of its field."""
    if not isinstance(config, ConfigDict):
        raise ConfigError(f"a config must be a ConfigDict made by default_config(), got {type(config).__name__}")
    changed = from_values(flat(config))
    for path, value in overrides.items():
        if path not in FIELDS:
            raise unknown(path, FIELDS)
        assign(changed, path, parse(FIELDS[path], value, path) if isinstance(value, str) else value)
    return validate(changed)


def load_module(file: str | Path) -> Any:
    """The config file as a module. ConfigError when it is missing or does not run."""
    file = Path(file)
    spec = importlib.util.spec_from_file_location(f"config_{file.stem}", file) if file.is_file() else None
    if spec is None or spec.loader is None:
        raise ConfigError(f"there is no Python config file {str(file)!r}")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise _in_file(file, error) from error
    return module


def build_choice(group: ConfigDict, kinds: Mapping[str, Callable[..., Any]], **common: Any) -> Any:
    """The object of a choice: `kinds[group.name]` called with the fields that are set and with `common`."""
    fields = {name: value for name, value in group.items() if name != "name" and value is not None}
    return kinds[group.name](**common, **fields)


def parse_arguments(arguments: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Splits a command line into options (`--workdir=D`) and config overrides (`--config.seed=1`), both as text.

    `--name=value` and `--name value` are the same. ConfigError for anything else.
    """
    options: dict[str, str] = {}
    overrides: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--"):
            raise ConfigError(f"unexpected argument {argument!r}; options look like --name=value")
        name, equals, value = argument[2:].partition("=")
        if not equals:
            if not rest:
                raise ConfigError(f"--{name} needs a value: --{name}=VALUE")
            value = rest.pop(0)
        is_override = name.startswith("config.")
        (overrides if is_override else options)[name.removeprefix("config.") if is_override else name] = value
    return options, overrides


def call(file: str | Path, module: Any, name: str) -> Any:
    """What the function of a config file gives. ConfigError when it is missing or fails, with the line of the file."""
    if not callable(getattr(module, name, None)):
        raise ConfigError(f"the config file {str(file)!r} has no function {name}()")
    try:
        return getattr(module, name)()
    except (Exception, SystemExit) as error:
        raise _in_file(Path(file), error) from error


def _in_file(file: Path, error: BaseException) -> ConfigError:
    """One line that says where in the user's file it went wrong."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    lines += [error.lineno] if isinstance(error, SyntaxError) else []
    where = f"{file}, line {lines[-1]}" if lines else str(file)
    return ConfigError(f"{where}: {_said(error)}")


def _said(error: BaseException) -> str:
    """What ml_collections says of a field, without its lists of all others and addresses of objects; else the error."""
    said = " ".join(str(error).split())
    if match := re.search(r'Key "(.+?)" does not exist', said):
        close = difflib.get_close_matches(match[1], {path.rsplit(".", 1)[-1] for path in FIELDS}, n=1)
        return f"there is no field {match[1]!r}" + (f"; did you mean {close[0]!r}?" if close else "")
    if match := re.search(r"override field '(\w+)'.* type <class '(\w+)'> .* type <class '(\w+)'>", said):
        return f"{match[1]} must be {match[3]}, got a {match[2]}"
    return f"{type(error).__name__}: {said}"
