"""Choices whose kinds are classes: those of a registry, which names them by text, and any from outside.

The fields of a kind are the keyword parameters of its constructor, with their types, defaults and help. A built-in
kind's are always in the config, unset; those of a kind from outside are there once it is chosen, at their defaults.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict, config_dict

from mha_research.config import sources
from mha_research.config.schema import Choice, ConfigError, Field, Schema, check, flatten, groups, unknown
from mha_research.config.signature import fields_of

METRICS = "metrics"


class Kinds(Mapping[str, Mapping[str, Field]]):
    """Name -> own fields, of the kinds in a registry `module:TABLE`; each is imported when its fields are first asked.

    Args:
        registry: where the table lies: name -> `package.module:Name`, or None for a name that stands for nothing.
        given: parameters that are no fields.
    """

    def __init__(self, registry: str, given: Collection[str] = ()) -> None:
        self.registry, self.given = registry, frozenset(given)
        self._fields: dict[str, Mapping[str, Field]] = {}

    @functools.cached_property
    def table(self) -> Mapping[str, str | None]:
        """What the registry says."""
        return _named(self.registry)

    def __getitem__(self, name: str) -> Mapping[str, Field]:
        if name not in self._fields:
            make = self.make(name)
            fields = {} if make is None else fields_of(make, self.given)
            self._fields[name] = {key: _unset(field) for key, field in fields.items()}
        return self._fields[name]

    def make(self, name: str) -> Callable[..., Any] | None:
        """The class or function of a name."""
        target = self.table[name]
        return None if target is None else _named(target)

    def __iter__(self) -> Iterator[str]:
        return iter(self.table)

    def __len__(self) -> int:
        return len(self.table)


def door(
    default: str, registry: str, doc: str, given: Collection[str], selector: str = "name", common: Schema | None = None
) -> Choice:
    """A choice among the kinds of a registry and any from outside; `given` parameters are passed by the factory."""
    common = {} if common is None else common
    hidden = {*given, *common, selector}
    return Choice(default, Kinds(registry, hidden), doc, selector, common, hidden)


def outside_names(schema: Schema, values: Mapping[str, Any]) -> dict[str, str]:
    """The names from outside among flat values, by the path of their field; those of `metrics` by `metrics.0`."""
    selectors = {f"{path}.{choice.selector}" for path, choice in groups(schema).items() if choice.open}
    named = {path: values[path] for path in values if path in selectors}
    named |= {f"{METRICS}.{number}": name for number, name in enumerate(values.get(METRICS) or ())}
    return {path: name for path, name in named.items() if sources.is_outside(name)}


def renamed(schema: Schema, values: Mapping[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """The flat values with every name from outside replaced."""
    new = {path: rename(name) for path, name in outside_names(schema, values).items()}
    changed = {path: new.get(path, value) for path, value in values.items()}
    if values.get(METRICS):
        changed[METRICS] = tuple(new.get(f"{METRICS}.{i}", name) for i, name in enumerate(values[METRICS]))
    return changed


def outside_fields(schema: Schema, values: Mapping[str, Any]) -> dict[str, Field]:
    """The fields, by path, that kinds from outside add to their groups. Raises ConfigError as `look_up` does."""
    named, found = outside_names(schema, values), {}
    for path, choice in groups(schema).items():
        if name := named.get(f"{path}.{choice.selector}"):
            found.update({f"{path}.{key}": field for key, field in _fields(name, choice).items()})
    return found


def _fields(name: str, choice: Choice) -> dict[str, Field]:
    """Own fields of a resolved name from outside."""
    assert choice.given is not None
    try:
        return fields_of(sources.look_up(name), choice.given)
    except TypeError as error:
        raise ConfigError(f"{sources.portable(name)}: {error}") from error


def chosen(schema: Schema, config: ConfigDict, path: str) -> tuple[Callable[..., Any] | None, dict[str, Any]]:
    """(what the group at a path has chosen: a class, a function, or None; its own fields that are set).

    Raises:
        ConfigError: for a parameter that has no default and is not set.
    """
    choice = groups(schema)[path]
    group = functools.reduce(lambda node, name: node[name], path.split("."), config)
    name = group[choice.selector]
    if sources.is_outside(name):
        make, own = sources.look_up(name), _fields(name, choice)
        values = {key: group[key] for key in own}
    else:
        assert isinstance(choice.kinds, Kinds)
        make, own = choice.kinds.make(name), choice.kinds[name]
        values = {key: group[key] for key in own if group[key] is not None}
    if missing := [key for key, field in own.items() if field.required and values.get(key) is None]:
        raise ConfigError(f"{path}.{missing[0]} must be set: {own[missing[0]].doc}")
    return make, values


def enter(group: ConfigDict, fields: Mapping[str, Field]) -> None:
    """Puts fields into a group, at their defaults."""
    with group.unlocked():
        for name, field in fields.items():
            if name in group:
                del group[name]
            if field.optional:  # None, in a config that remembers the type
                group[name] = config_dict.placeholder(tuple if field.sequence else field.type)
            if field.default is not None:
                group[name] = field.default


def use_in(schema: Schema, group: ConfigDict, name: str, fields: Mapping[str, Any]) -> None:
    """Chooses a kind by its name in a group of a config; see `mha_research.config.use`."""
    path, choice = _door_of(schema, group)
    static = flatten(choice.schema())
    if sources.is_outside(name):
        name = sources.resolve(name)
        own = _fields(name, choice)
    else:
        own = {}
        check(static[choice.selector], name, f"{path}.{choice.selector}")
    known = {key: field for key, field in {**static, **own}.items() if "." not in key and key != choice.selector}
    if wrong := [key for key in fields if key not in known]:
        raise unknown(f"{path}.{wrong[0]}", [f"{path}.{key}" for key in known])
    with group.unlocked():
        for key in [key for key in group if key not in choice.schema()]:
            del group[key]
    enter(group, {key: field for key, field in static.items() if key in choice.own()})
    enter(group, own)
    group[choice.selector] = name
    for key, value in fields.items():
        group[key] = check(known[key], value, f"{path}.{key}")


def _door_of(schema: Schema, group: ConfigDict) -> tuple[str, Choice]:
    """The path and choice of a group of a config, known by the fields that it holds."""
    if isinstance(group, ConfigDict):
        for path, choice in groups(schema).items():
            if choice.open and set(choice.schema()) <= set(group):
                return path, choice
    doors = [path for path, choice in groups(schema).items() if choice.open]
    raise ConfigError(f"use() takes one of the groups {', '.join(doors)} of a config; got {type(group).__name__}")


def _unset(field: Field) -> Field:
    """A built-in kind's field as the config holds it: None until set, with its default in the help."""
    default = "" if field.default is None else f" ({field.default})"
    return dataclasses.replace(field, default=None, optional=True, doc=field.doc + default)


def _named(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)
