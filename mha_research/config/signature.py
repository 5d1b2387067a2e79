"""The keyword parameters of a constructor as fields of a config: types and defaults from the signature, help from the
docstring."""

import inspect
import re
import types
import typing
from collections.abc import Callable, Collection
from typing import Any, Literal

from mha_research.config.schema import Field

_SCALARS = (bool, int, float, str)


def parameters(make: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Every parameter that can be given by name, those of the parents included where `**kwargs` hands them on.

    A class that hands them to another than its parent names that one as `hands_on_to`.

    Annotations are resolved, those of `from __future__ import annotations` too.
    """
    if not inspect.isclass(make):
        return _named(make)[0]
    found: dict[str, inspect.Parameter] = {}
    for base in make.__mro__:
        if "__init__" not in vars(base) or base is object:
            continue
        named, hands_on = _named(vars(base)["__init__"])
        found = {**named, **found}
        if not hands_on:
            break
    else:
        if other := getattr(make, "hands_on_to", None):
            found = {**parameters(other), **found}
    found.pop("self", None)
    return found


def accepts(make: Callable[..., Any], name: str) -> bool:
    """Whether the call has a parameter of that name."""
    return name in parameters(make)


def fields_of(make: Callable[..., Any], given: Collection[str] = ()) -> dict[str, Field]:
    """The fields that a kind adds to its group: its keyword parameters but for those that are `given` to it.

    A parameter whose type a config cannot hold (anything but bool, int, float, str, a Literal of texts, None or those,
    tuples of them) is no field where it has a default.

    Raises:
        TypeError: for such a parameter without a default, which nothing could set.
    """
    help_texts = documented(make)
    fields = {}
    for name, parameter in parameters(make).items():
        if name in given or name.startswith("_"):
            continue
        doc = help_texts.get(name, f"parameter of {_name(make)}")
        field = _field(parameter, doc)
        if field is not None:
            fields[name] = field
        elif parameter.default is inspect.Parameter.empty:
            raise TypeError(
                f"{_name(make)}: the parameter {name!r} needs a default, or a type that a config can hold (bool, int, "
                f"float, str, None or those, tuples of them), got {parameter.annotation!r}"
            )
    return fields


def documented(make: Callable[..., Any]) -> dict[str, str]:
    """The help text of each parameter in the `Args:` sections of a docstring, those of parent classes included."""
    found: dict[str, str] = {}
    for base in make.__mro__ if inspect.isclass(make) else (make,):
        texts = [vars(base).get("__doc__")] if inspect.isclass(base) else [base.__doc__]
        if inspect.isclass(base) and "__init__" in vars(base):
            texts.append(vars(base)["__init__"].__doc__)
        for text in texts:
            found = _arguments(text or "") | found
    return found


def _named(function: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    """(the parameters that can be given by name, whether it takes any others as well)."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    try:
        signature = inspect.signature(function, eval_str=True).parameters
    except NameError:  # a name that only type checkers import
        signature = inspect.signature(function).parameters
    named = {name: parameter for name, parameter in signature.items() if parameter.kind in kinds}
    return named, any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in signature.values())


def _field(parameter: inspect.Parameter, doc: str) -> Field | None:
    """The field of one parameter; None where a config cannot hold its type.

    An annotation that says more than a config can hold (an array or a number) counts as the type of its default.
    """
    annotation, bounds = parameter.annotation, ""
    if typing.get_origin(annotation) is typing.Annotated:
        annotation, bounds, *_ = typing.get_args(annotation)
    required = parameter.default is inspect.Parameter.empty
    default = None if required else parameter.default
    held = _held(annotation) or _held(type(default))
    if held is None:
        return None
    type_, optional, sequence, values = held
    if type_ is float and isinstance(default, int):
        default = float(default)
    return Field(default, type_, doc, optional or default is None, sequence, values, bounds, required=required)


def _held(annotation: Any) -> tuple[type, bool, bool, tuple[str, ...]] | None:
    """(scalar type, whether None may stand there, whether it is a tuple, the texts that may) of an annotation."""
    optional = sequence = False
    values: tuple[str, ...] = ()
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(annotation) if member is not type(None)]
        optional = len(members) < len(typing.get_args(annotation))
        if len(members) != 1:
            return None
        annotation = members[0]
    if typing.get_origin(annotation) is tuple:
        items = {item for item in typing.get_args(annotation) if item is not Ellipsis}
        if len(items) != 1:
            return None
        sequence, annotation = True, items.pop()
    if typing.get_origin(annotation) is Literal:
        values, annotation = typing.get_args(annotation), str
    if annotation not in _SCALARS or not all(isinstance(value, str) for value in values):
        return None
    return annotation, optional, sequence, values


def _arguments(text: str) -> dict[str, str]:
    """name -> text of an `Args:` section: a line `name: text` each, gone on in lines that are indented further."""
    match = re.search(r"^[ \t]*Args?:[ \t]*\n(.*?)(?=^[ \t]*\w+:[ \t]*$|\Z)", inspect.cleandoc(text), re.S | re.M)
    found: dict[str, str] = {}
    current = ""
    body = inspect.cleandoc("\n" + match[1]) if match else ""
    for line in body.splitlines():
        head = re.match(r"(\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: \([^)]*\))?: (.*)", line)
        if head:
            current = head[1]
            found[current] = head[2].strip()
        elif not line.strip():
            continue
        elif current and line[:1].isspace():
            found[current] += " " + line.strip()
        else:
            current = ""
    return {name.strip(): said.rstrip(".") for names, said in found.items() for name in names.split(",")}


def _name(make: Callable[..., Any]) -> str:
    return getattr(make, "__name__", repr(make))
