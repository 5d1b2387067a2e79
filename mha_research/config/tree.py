"""A config as flat values, as JSON, and beside another config."""

import json
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from mha_research.config.default import FIELDS, SCHEMA, default_config
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


def assign(config: ConfigDict, path: str, value: Any) -> None:
    """Sets the field at a dotted path, or raises ConfigError with the nearest field that exists."""
    if path not in FIELDS:
        raise unknown(path, FIELDS)
    *parents, name = path.split(".")
    for parent in parents:
        config = config[parent]
    config[name] = check(FIELDS[path], value, path)


def validate(config: ConfigDict) -> ConfigDict:
    """The same config, locked, once each field is there, has its type and belongs to the kind that its group chose."""
    values = flat(config)
    if missing := [path for path in FIELDS if path not in values]:
        raise ConfigError(f"the config lacks the field {missing[0]!r}; build it from default_config()")
    for path, value in values.items():
        if path not in FIELDS:
            raise unknown(path, FIELDS)
        check(FIELDS[path], value, path)
    for path, choice in groups(SCHEMA).items():
        kind = values[f"{path}.{choice.selector}"]
        for field in choice.own():
            if values[f"{path}.{field}"] is not None and field not in choice.kinds[kind]:
                owners = " or ".join(repr(kind) for kind, fields in choice.kinds.items() if field in fields)
                raise ConfigError(
                    f"{path}.{field} belongs to {path}.{choice.selector} = {owners}, "
                    f"but the {choice.selector} is {kind!r}"
                )
    return config.lock()


def within_bounds(config: ConfigDict) -> ConfigDict:
    """The validated config, once every number lies in the bounds of its field; else ConfigError."""
    config = validate(config)
    for path, value in flat(config).items():
        check_bounds(FIELDS[path], value, path)
    return config


def differences(old: ConfigDict, new: ConfigDict) -> dict[str, tuple[Any, Any]]:
    """The fields in which two configs differ, as path: (old, new); `run.*` is left out, for it changes no number."""
    before, after = flat(old), flat(new)
    return {
        path: (before[path], after[path])
        for path in FIELDS
        if not path.startswith("run.") and before[path] != after[path]
    }


def to_json(config: ConfigDict) -> str:
    """The config as readable JSON. Tuples become lists, which `from_json` makes tuples again."""
    return json.dumps(config.to_dict(), indent=2, allow_nan=False) + "\n"


def from_json(text: str) -> ConfigDict:
    """The config that `to_json` wrote. ConfigError for text that is no config, an unknown field or a wrong type."""
    try:
        values = json.loads(text)
        if not isinstance(values, dict):
            raise TypeError(f"expected an object, got {type(values).__name__}")
        values = flat(values)
    except (json.JSONDecodeError, TypeError, RecursionError) as error:
        raise ConfigError(f"a saved config is not readable: {error}") from None
    return validate(from_values(values))


def from_values(values: Mapping[str, Any]) -> ConfigDict:
    """A new config with the values at their dotted paths. ConfigError for an unknown field or a wrong type."""
    config = default_config()
    for path, value in values.items():
        assign(config, path, value)
    return config
