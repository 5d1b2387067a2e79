"""From a config file and overrides to one checked config."""

import difflib
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from mha_research.config import sources
from mha_research.config.default import SCHEMA, builtin_fields, known_fields
from mha_research.config.doors import METRICS, renamed
from mha_research.config.schema import ConfigError, groups, parse, unknown
from mha_research.config.sources import error_in_file
from mha_research.config.tree import flat, from_values, validate


def load_config(file: str | Path, overrides: Mapping[str, Any] | None = None) -> ConfigDict:
    """`get_config()` of the Python file, with the overrides applied, checked and locked.

    Overrides map dotted paths (`model.attention.num_heads`) to values, or to text as a command line gives it. Files from
    outside that the config file names are looked for beside it, those of the overrides in the working directory first.
    Raises ConfigError, whose message is one line, for a file, a field or a value that is wrong.
    """
    folder, here = Path(file).absolute().parent, Path.cwd()
    with sources.looking_in(folder, here):
        config = override(call(file, load_module(file), "get_config"), {})
    with sources.looking_in(here, folder):
        return override(config, overrides or {})


def override(config: ConfigDict, overrides: Mapping[str, Any]) -> ConfigDict:
    """A changed, checked and locked copy of the config; text is parsed to the type of its field.

    Code from outside that the overrides name is trusted from then on.
    """
    if not isinstance(config, ConfigDict):
        raise ConfigError(f"a config must be a ConfigDict made by default_config(), got {type(config).__name__}")
    values = renamed(SCHEMA, flat(config), sources.resolve_if_relative)
    return changed(values, renamed(SCHEMA, _parsed_names(overrides), sources.resolve))


def changed(values: Mapping[str, Any], changes: Mapping[str, Any]) -> ConfigDict:
    """The config of flat values with changes, whose names from outside are resolved already."""
    changes = _parsed_names(changes)
    values = {**_without_fields_of_old_kinds(values, changes), **changes}
    fields = known_fields(values)
    if wrong := [path for path in values if path not in fields]:
        raise unknown(wrong[0], fields)
    parsed = {
        path: parse(fields[path], value, path) if isinstance(value, str) and path in changes else value
        for path, value in values.items()
    }
    return validate(from_values(parsed))


def _parsed_names(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The changes, with a list of metrics that is a text made a tuple."""
    metrics = changes.get(METRICS)
    parsed = {METRICS: parse(builtin_fields()[METRICS], metrics, METRICS)} if isinstance(metrics, str) else {}
    return {**changes, **parsed}


def _without_fields_of_old_kinds(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The values but for those that a kind from outside brought, which another kind now takes the place of."""
    kept = dict(values)
    for path, choice in groups(SCHEMA).items():
        selector = f"{path}.{choice.selector}"
        old = values.get(selector)
        if sources.is_outside(old) and changes.get(selector, old) != old:
            stay = {choice.selector, *choice.common}
            for key in values:
                if key.startswith(f"{path}.") and key[len(path) + 1 :].split(".")[0] not in stay:
                    del kept[key]
    return kept


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
        raise error_in_file(file, error, _said(error)) from error
    return module


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
        raise error_in_file(Path(file), error, _said(error)) from error


def _said(error: BaseException) -> str:
    """What ml_collections says of a field, without its lists of all others and addresses of objects; else the error."""
    said = " ".join(str(error).split())
    if match := re.search(r'Key "(.+?)" does not exist', said):
        close = difflib.get_close_matches(match[1], {path.rsplit(".", 1)[-1] for path in builtin_fields()}, n=1)
        return f"there is no field {match[1]!r}" + (f"; did you mean {close[0]!r}?" if close else "")
    if match := re.search(r"override field '(\w+)'.* type <class '(\w+)'> .* type <class '(\w+)'>", said):
        return f"{match[1]} must be {match[3]}, got a {match[2]}"
    return said if isinstance(error, ConfigError) else f"{type(error).__name__}: {said}"
