"""Typed, documented fields: what a config may hold, how text becomes a value, and the errors that name the field."""

import ctypes
import dataclasses
import difflib
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any


class ConfigError(ValueError):
    """A config, or an override of it, is wrong. The message is one line and names the full path of the field."""


@dataclasses.dataclass(frozen=True)
class Field:
    """One value of the tree.

    `type` is bool, int, float or str; `optional` allows None (unset); `sequence` makes it a tuple of `type`;
    `values` lists what a text may be; `open` allows beside them a name from outside, `file.py:Name`; `bounds` is the
    interval that a number must lie in before anything is run (`[0, 1)`, `(0, inf)`): a saved config with another number
    can still be read; `required` says that it must be set, having no default.
    """

    default: Any
    type: type
    doc: str
    optional: bool = False
    sequence: bool = False
    values: tuple[str, ...] = ()
    bounds: str = ""
    open: bool = False
    required: bool = False

    def describe(self) -> str:
        names = [repr(value) for value in self.values] + (["FILE.py:NAME"] if self.open else [])
        name = " or ".join(names) or self.type.__name__
        name = f"a tuple of {name}" if self.sequence else name
        return f"{name} or None" if self.optional else name


@dataclasses.dataclass(frozen=True)
class Choice:
    """A group `{name, ...the fields of every kind}`: `kinds` says which fields belong to which name.

    `selector` is what the name is called there; `common` are further fields, which every kind has; `given` names the
    parameters that are not fields because whoever builds the object passes them. A choice is `open` where `given` is
    there: then a name may also come from outside, `file.py:Name`.
    """

    default: str
    kinds: Mapping[str, Mapping[str, Field]]
    doc: str
    selector: str = "name"
    common: "Schema" = dataclasses.field(default_factory=dict)
    given: Collection[str] | None = None

    @property
    def open(self) -> bool:
        return self.given is not None

    def own(self) -> dict[str, Field]:
        """Every kind's own fields; kinds that share a field share its type, and are unset unless set."""
        merged: dict[str, Field] = {}
        for kind, fields in self.kinds.items():
            for name, field in fields.items():
                if not field.optional or not _alike(merged.setdefault(name, field), field):
                    raise TypeError(f"field {name!r} of kind {kind!r} must be optional and alike in every kind")
        return {name: dataclasses.replace(field, doc=self._help(name)) for name, field in merged.items()}

    def _help(self, name: str) -> str:
        """What the kinds that have the field say of it, each beside its kinds where they say different things."""
        said: dict[str, list[str]] = {}
        for kind, fields in self.kinds.items():
            if name in fields:
                said.setdefault(fields[name].doc, []).append(kind)
        return next(iter(said)) if len(said) == 1 else "; ".join(f"{', '.join(who)}: {doc}" for doc, who in said.items())

    def schema(self) -> "Schema":
        """The name, the common fields, then every kind's own."""
        return {
            self.selector: Field(self.default, str, self.doc, values=tuple(self.kinds), open=self.open),
            **self.common,
            **self.own(),
        }


def _alike(a: Field, b: Field) -> bool:
    """Whether two kinds can share a field: what it means may be said in other words."""
    return dataclasses.replace(a, doc="", required=False) == dataclasses.replace(b, doc="", required=False)


Schema = Mapping[str, "Field | Choice | Schema"]


def field(default: Any, doc: str, values: Iterable[str] = (), bounds: str = "") -> Field:
    """A field that always has a value; its type is that of the default."""
    return Field(default, type(default), doc, values=tuple(values), bounds=bounds)


def optional(type_: type, doc: str, values: Iterable[str] = (), bounds: str = "") -> Field:
    """A field that may be None, which it is unless set."""
    return Field(None, type_, doc, optional=True, values=tuple(values), bounds=bounds)


def optional_sequence(type_: type, doc: str, bounds: str = "") -> Field:
    """A tuple of any length, None unless set; the bounds are those of each item."""
    return Field(None, type_, doc, optional=True, sequence=True, bounds=bounds)


def flatten(schema: Schema, prefix: str = "") -> dict[str, Field]:
    """Every field by its full dotted path, in declaration order."""
    flat: dict[str, Field] = {}
    for name, node in schema.items():
        path = prefix + name
        if isinstance(node, Field):
            flat[path] = node
        else:
            flat.update(flatten(node.schema() if isinstance(node, Choice) else node, path + "."))
    return flat


def groups(schema: Schema, prefix: str = "") -> dict[str, Choice]:
    """Every choice by the path of its group."""
    found: dict[str, Choice] = {}
    for name, node in schema.items():
        path = prefix + name
        if isinstance(node, Choice):
            found[path] = node
        if not isinstance(node, Field):
            found.update(groups(node.common if isinstance(node, Choice) else node, path + "."))
    return found


def unknown(path: str, known: Iterable[str]) -> ConfigError:
    """The error for a field that does not exist, with the nearest one that does."""
    known = list(known)
    leaf = path.rsplit(".", 1)[-1]
    close = (
        difflib.get_close_matches(path, known, n=1, cutoff=0.6)
        or [name for name in known if name.rsplit(".", 1)[-1] == leaf][:1]
    )
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return ConfigError(f"there is no field {path!r} in the config{hint}")


def check(field: Field, value: Any, path: str) -> Any:
    """The value as the field's type (an int becomes a float, a list a tuple), or ConfigError naming the path."""
    if value is None and field.optional:
        return None
    if field.sequence:
        if not isinstance(value, (tuple, list)):
            raise _wrong(field, value, path)
        return tuple(_scalar(field, item, path) for item in value)
    return _scalar(field, value, path)


def check_bounds(field: Field, value: Any, path: str) -> None:
    """ConfigError where a number of the field does not fit the 32 bits that JAX computes with, or its bounds.

    A float is compared as it is rounded there: 1e-50 is 0, and 1 - 1e-12 is 1.
    """
    for number in value if isinstance(value, tuple) else (value,):
        if number is None or field.type not in (int, float):
            continue
        rounded = ctypes.c_float(number).value if field.type is float else number
        if abs(rounded) >= 2**31 if field.type is int else math.isinf(rounded):
            largest = "2^31" if field.type is int else "3.4e38"
            raise ConfigError(f"{path} must be smaller than {largest} in size, got {number}")
        if field.bounds and not _inside(field.bounds, rounded):
            raise ConfigError(f"{path} must be {bounds_in_words(field.bounds)}, got {number}")


def bounds_in_words(bounds: str) -> str:
    """`1 or more`, `above 0`, `in [0, 1)`."""
    low, high = bounds[1:-1].split(", ")
    if high != "inf":
        return f"in {bounds}"
    return f"{low} or more" if bounds[0] == "[" else f"above {low}"


def _inside(bounds: str, number: float) -> bool:
    low, high = map(float, bounds[1:-1].split(", "))
    return low < number < high or (bounds[0] == "[" and number == low) or (bounds[-1] == "]" and number == high)


def parse(field: Field, text: str, path: str) -> Any:
    """The value that a command line gives as text: `None` unsets, `1e-4` is a float, `1,2` or `(1, 2)` a tuple.

    Spaces around a number mean nothing; those of a text are part of it.
    """
    if field.optional and text.strip() in ("None", "none", "null"):
        return None
    if field.type is str and not field.sequence:
        return _scalar(field, text, path)
    text = text.strip()
    if field.sequence:
        inner = text[1:-1] if text[:1] in ("(", "[") and text[-1:] in (")", "]") else text
        return tuple(_parse_scalar(field, item.strip(), path) for item in inner.split(",") if item.strip())
    return _parse_scalar(field, text, path)


def _parse_scalar(field: Field, text: str, path: str) -> Any:
    try:
        if field.type is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if field.type is int:
            number = float(text)
            return int(text) if number != int(number) or abs(number) >= 2**53 or text.isdigit() else int(number)
        if field.type is float:
            return check(field, float(text), path)
    except (KeyError, ValueError, OverflowError) as error:
        raise error if isinstance(error, ConfigError) else _wrong(field, text, path) from None
    return _scalar(field, text, path)


def _scalar(field: Field, value: Any, path: str) -> Any:
    if field.type is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    outside = field.open and isinstance(value, str) and ":" in value
    if type(value) is not field.type or (field.values and value not in field.values and not outside):
        raise _wrong(field, value, path)
    if field.optional and value == "":
        raise ConfigError(f"{path} is empty; leave it out, or None, where it is not wanted")
    if isinstance(value, str) and not _is_unicode(value):
        raise ConfigError(f"{path} must be Unicode text, got {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{path} must be finite, got {value!r}")
    return value


def _is_unicode(text: str) -> bool:
    """False for what a command line in another encoding leaves: it cannot be written to a file, or to a log."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _wrong(field: Field, value: Any, path: str) -> ConfigError:
    close = difflib.get_close_matches(str(value), field.values, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return ConfigError(f"{path} must be {field.describe()}, got {value!r}{hint}")
