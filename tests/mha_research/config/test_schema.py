"""S21 and S22: text from a command line becomes a value of the declared type, or an error that names the field."""

import pytest

from mha_research.config import ConfigError, default_config, override, within_bounds
from mha_research.config.default import FIELDS
from mha_research.config.schema import (
    Choice,
    Field,
    check,
    check_bounds,
    field,
    flatten,
    optional,
    optional_sequence,
    parse,
)

OPTIONAL_FLOATS = [path for path, leaf in FIELDS.items() if leaf.optional and leaf.type is float and not leaf.sequence]


def test_every_optional_float_takes_numbers_and_none_and_refuses_text() -> None:
    assert len(OPTIONAL_FLOATS) > 10
    for path in OPTIONAL_FLOATS:
        for text, value in {"0": 0.0, "0.1": 0.1, "1e-4": 0.0001, "-2": -2.0, "None": None}.items():
            parsed = parse(FIELDS[path], text, path)
            assert parsed == value
            assert type(parsed) is type(value)
        with pytest.raises(ConfigError, match=rf"^{path} must be float or None, got 'abc'$"):
            parse(FIELDS[path], "abc", path)


def test_every_optional_field_takes_none_and_refuses_another_type() -> None:
    optional_fields = {path: leaf for path, leaf in FIELDS.items() if leaf.optional}
    wrong = {bool: "maybe", int: "1.5", float: "abc"}
    for path, leaf in optional_fields.items():
        assert parse(leaf, "None", path) is None
        assert leaf.default is None
        if leaf.type is not str or leaf.values:
            with pytest.raises(ConfigError, match=rf"^{path} must be "):
                parse(leaf, wrong.get(leaf.type, "none of them"), path)
    assert {leaf.type for leaf in optional_fields.values()} == {bool, int, float, str}


def test_an_optional_field_is_none_unless_set_and_can_be_unset_again() -> None:
    config = default_config()
    assert config.optimizer.clip_norm is None
    changed = override(config, {"optimizer.clip_norm": "0.5"})
    assert changed.optimizer.clip_norm == 0.5
    assert override(changed, {"optimizer.clip_norm": "None"}).optimizer.clip_norm is None
    assert override(changed, {"optimizer.clip_norm": None}).optimizer.clip_norm is None
    assert config.optimizer.clip_norm is None


@pytest.mark.parametrize(
    "text,value", [("1e-3", 0.001), ("1e-4", 0.0001), ("3.0e-4", 0.0003), ("1E5", 100000.0), (".5", 0.5)]
)
def test_scientific_notation_is_a_float(text: str, value: float) -> None:
    parsed = override(default_config(), {"optimizer.learning_rate": text}).optimizer.learning_rate
    assert parsed == value
    assert type(parsed) is float


@pytest.mark.parametrize(
    "text,value", [("7", 7), ("-3", -3), ("1e3", 1000), ("123456789012345678901", 123456789012345678901)]
)
def test_integers(text: str, value: int) -> None:
    parsed = parse(field(0, ""), text, "seed")
    assert parsed == value
    assert type(parsed) is int


@pytest.mark.parametrize("text", ["8.5", "eight", "", "nan", "inf", "True"])
def test_what_is_no_integer_is_refused_by_full_path(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^model\.d_model must be int, got "):
        override(default_config(), {"model.d_model": text})


@pytest.mark.parametrize("value", [8.0, True, None, "8", (8,)])
def test_a_python_value_of_another_type_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^seed must be int, got "):
        check(field(0, ""), value, "seed")


def test_tuples() -> None:
    lengths = optional_sequence(int, "")
    for text in ("256,512", "(256, 512)", "[256,512,]"):
        assert parse(lengths, text, "p") == (256, 512)
    assert parse(lengths, "()", "p") == ()
    assert check(lengths, [3], "p") == (3,)
    with pytest.raises(ConfigError, match="p must be a tuple of int or None, got"):
        parse(lengths, "1,x", "p")


@pytest.mark.parametrize("text,value", [("true", True), ("False", False), ("0", False), ("1", True)])
def test_booleans(text: str, value: bool) -> None:
    assert parse(field(False, ""), text, "p") is value


def test_a_mistyped_field_is_named_with_the_nearest_one() -> None:
    nearest = {
        "model.dmodel": "model.d_model",
        "modle.d_model": "model.d_model",
        "num_heads": "model.attention.num_heads",
    }
    for wrong, right in nearest.items():
        with pytest.raises(
            ConfigError, match=rf"^there is no field '{wrong}' in the config; did you mean '{right}'\?$"
        ):
            override(default_config(), {wrong: 1})


def test_a_value_outside_the_list_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"^model\.norm must be 'rms_norm' or 'layer_norm', got 'rmsnorm'; did you mean 'rms_norm'\?$"
    ):
        override(default_config(), {"model.norm": "rmsnorm"})


def test_not_a_number_is_no_number() -> None:
    for text in ("nan", "inf", "-inf"):
        with pytest.raises(ConfigError, match=r"optimizer\.learning_rate must be finite"):
            override(default_config(), {"optimizer.learning_rate": text})


def test_the_fields_of_a_choice_must_be_optional() -> None:
    shared = optional(float, "x")
    assert flatten({"g": Choice("a", {"a": {"x": shared}, "b": {"x": shared}}, "")}).keys() == {"g.name", "g.x"}
    with pytest.raises(TypeError, match="field 'x' of kind 'a' must be optional"):
        flatten({"g": Choice("a", {"a": {"x": field(1.0, "")}}, "")})
    with pytest.raises(TypeError, match="alike in every kind"):
        flatten({"g": Choice("a", {"a": {"x": shared}, "b": {"x": optional(int, "x")}}, "")})


def test_every_field_is_documented() -> None:
    assert all(isinstance(leaf, Field) and len(leaf.doc) > 5 for leaf in FIELDS.values())


@pytest.mark.parametrize(
    "bounds,inside,outside,words",
    [
        ("[1, inf)", [1, 2.5], [0, -1, 0.999], "1 or more"),
        ("(0, inf)", [1e-30, 7], [0, -1, 1e-50], "above 0"),  # 1e-50 is 0 in float32
        ("[0, 1)", [0, 0.5], [-0.1, 1, 1 - 1e-12], r"in \[0, 1\)"),  # 1 - 1e-12 is 1 in float32
        ("[0, 1]", [0, 1], [1.5], r"in \[0, 1\]"),
    ],
)
def test_bounds(bounds: str, inside: list[float], outside: list[float], words: str) -> None:
    leaf = optional(float, "", bounds=bounds)
    for number in [*map(float, inside), None]:
        check_bounds(leaf, number, "p")
    for number in map(float, outside):
        with pytest.raises(ConfigError, match=rf"^p must be {words}, got {number}$"):
            check_bounds(leaf, number, "p")


def test_every_number_must_fit_the_32_bits_that_jax_computes_with() -> None:
    for leaf, largest, beyond, words in (
        (field(0, ""), 2**31 - 1, 2**31, r"2\^31"),
        (field(0.0, ""), 3.4e38, 1e39, "3.4e38"),
    ):
        for sign in (1, -1):
            check_bounds(leaf, sign * largest, "p")
            with pytest.raises(ConfigError, match=rf"^p must be smaller than {words} in size"):
                check_bounds(leaf, sign * beyond, "p")
    with pytest.raises(ConfigError, match=r"^p must be smaller than 2\^31 in size, got 2147483648$"):
        check_bounds(optional_sequence(int, ""), (3, 2**31), "p")


def test_every_default_lies_in_its_bounds() -> None:
    assert within_bounds(default_config())
    assert sum(bool(leaf.bounds) for leaf in FIELDS.values()) > 30


def test_text_is_kept_as_it_is_and_no_optional_text_is_empty() -> None:
    assert override(default_config(), {"run.sample_prompt": " The "}).run.sample_prompt == " The "
    assert override(default_config(), {"run.sample_prompt": ""}).run.sample_prompt == ""
    for path, leaf in FIELDS.items():
        if leaf.type is str and leaf.optional:
            with pytest.raises(ConfigError, match=rf"^{path} (is empty|must be .*, got '')"):
                override(default_config(), {path: ""})  # what an unset variable of a shell leaves
    with pytest.raises(ConfigError, match=r"^run\.sample_prompt must be Unicode text, got '\\udcff'$"):
        override(default_config(), {"run.sample_prompt": "\udcff"})
