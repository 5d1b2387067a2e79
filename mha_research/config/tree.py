"""A config as flat values, as JSON, and beside another config."""

import functools
import json
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from ml_collections import ConfigDict

from mha_research.config import sources, trust
from mha_research.config.default import SCHEMA, builtin_fields, default_config, known_fields
from mha_research.config.doors import enter, outside_fields, outside_names, renamed
from mha_research.config.schema import ConfigError, check, check_bounds, groups, unknown


def flat(config: ConfigDict | Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every value by its dotted path."""
    values: dict[str, Any] = {}
    for name in config:
        value = config[name]
        if isinstance(value, (ConfigDict, Mapping)):
            values.update(flat(value, f"{prefix}{name}."))
        else:
            values[prefix + name] = value
    return values


def validate(config: ConfigDict) -> ConfigDict:
    """The same config, locked, once each field is there, has its type and belongs to the kind that its group chose."""
    values = flat(config)
    if missing := [path for path in builtin_fields() if path not in values]:
        raise ConfigError(f"the config lacks the field {missing[0]!r}; build it from default_config()")
    fields, own = known_fields(values), outside_fields(SCHEMA, values)
    for path, value in values.items():
        if path not in fields:
            raise unknown(path, fields)
        check(fields[path], value, path)
    for path, choice in groups(SCHEMA).items():
        kind = values[f"{path}.{choice.selector}"]
        for field in choice.own():
            if (
                values[f"{path}.{field}"] is not None
                and field not in choice.kinds.get(kind, ())
                and f"{path}.{field}" not in own
            ):
                owners = " or ".join(repr(kind) for kind, fields in choice.kinds.items() if field in fields)
                raise ConfigError(
                    f"{path}.{field} belongs to {path}.{choice.selector} = {owners}, "
                    f"but the {choice.selector} is {kind!r}"
                )
    return config.lock()


def within_bounds(config: ConfigDict) -> ConfigDict:
    """The validated config, once every number lies in the bounds of its field; else ConfigError."""
    config = validate(config)
    values = flat(config)
    fields = known_fields(values)
    for path, value in values.items():
        check_bounds(fields[path], value, path)
    return config


def differences(old: ConfigDict, new: ConfigDict) -> dict[str, tuple[Any, Any]]:
    """The fields in which two configs differ, as path: (old, new), None for a field that one of them lacks.

    `run.*` is left out, for it changes no number, and so is the folder that a file from outside lies in.
    """
    before, after = (renamed(SCHEMA, flat(config), sources.portable) for config in (old, new))
    return {
        path: (before.get(path), after.get(path))
        for path in {**before, **after}
        if not path.startswith("run.") and before.get(path) != after.get(path)
    }


def named_outside(config: ConfigDict | Mapping[str, Any]) -> list[str]:
    """The resolved names of all code from outside that a config uses."""
    return list(outside_names(SCHEMA, flat(config)).values())


def portable(config: ConfigDict | Mapping[str, Any]) -> dict[str, Any]:
    """Flat values as they are written down: files from outside by their name alone."""
    return renamed(SCHEMA, flat(config), sources.portable)


def located(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Flat values that were written down, with the files from outside that are kept in a folder."""
    return renamed(SCHEMA, values, functools.partial(sources.kept_in, folder))


def to_json(config: ConfigDict) -> str:
    """The config as readable JSON. Tuples become lists, which `from_json` makes tuples again."""
    return json.dumps(nested(portable(config)), indent=2, allow_nan=False) + "\n"


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of flat values."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *parents, name = path.split(".")
        functools.reduce(lambda node, parent: node.setdefault(parent, {}), parents, tree)[name] = value
    return tree


def from_json(text: str, folder: Path | None = None) -> ConfigDict:
    """The config that `to_json` wrote.

    Args:
        text: JSON.
        folder: where the files from outside are kept, that the config names.

    Raises:
        ConfigError: for text that is no config, an unknown field or a wrong type, and for code from outside without a
            folder or that this user has not named (see `trust`).
    """
    values = read_values(text)
    if folder is not None:
        values = located(values, folder)
    for name in outside_names(SCHEMA, values).values():
        if sources.is_file(name) and not PurePath(name.rpartition(":")[0]).is_absolute():
            raise ConfigError(f"a saved config names {name!r}, and nothing says where that file is kept")
    return validate(from_values(values))


def trust_kept(text: str, folder: Path) -> None:
    """Lets the code run that a saved config names and a folder keeps."""
    names = outside_names(SCHEMA, located(read_values(text), folder)).values()
    trust.remember(sources.fingerprints(names))


def saved_differences(text: str, config: ConfigDict) -> dict[str, tuple[Any, Any]]:
    """As `differences` between a config that was written down and one of now, without running code that it names.

    Raises:
        ConfigError: for text that is no config of this version.
    """
    saved, now = {**_as_saved(default_config()), **read_values(text)}, _as_saved(config)
    names, current = outside_names(SCHEMA, saved), outside_names(SCHEMA, now)
    if changed := {path: (names.get(path), now.get(path)) for path in {**names, **current} if names.get(path) != current.get(path)}:
        return changed
    located_now = {path: name for path, name in outside_names(SCHEMA, flat(config)).items()}
    by_name = dict(zip(map(sources.portable, located_now.values()), located_now.values()))
    return differences(validate(from_values(renamed(SCHEMA, saved, by_name.__getitem__))), config)


def _as_saved(config: ConfigDict) -> dict[str, Any]:
    return read_values(to_json(config))


def read_values(text: str) -> dict[str, Any]:
    """The flat values of saved JSON, without running any code that they name. ConfigError for text that is no config."""
    try:
        values = json.loads(text)
        if not isinstance(values, dict):
            raise TypeError(f"expected an object, got {type(values).__name__}")
        return flat(values)
    except (json.JSONDecodeError, TypeError, RecursionError) as error:
        raise ConfigError(f"a saved config is not readable: {error}") from None


def from_values(values: Mapping[str, Any]) -> ConfigDict:
    """A new config with the values at their dotted paths. ConfigError for an unknown field or a wrong type."""
    config, own = default_config(), outside_fields(SCHEMA, values)
    fields = {**builtin_fields(), **own}
    for path, field in own.items():
        group, name = _group(config, path)
        enter(group, {name: field})
    for path, value in values.items():
        if path not in fields:
            raise unknown(path, fields)
        if value is None and path in own and not own[path].optional:
            continue  # a built-in kind has a field of that name, which is unset
        group, name = _group(config, path)
        group[name] = check(fields[path], value, path)
    return config


def _group(config: ConfigDict, path: str) -> tuple[ConfigDict, str]:
    *parents, name = path.split(".")
    return functools.reduce(lambda node, parent: node[parent], parents, config), name
