"""Config files, choices, saved configs: what is refused, and in which words."""

import pathlib

import pytest

from mha_research.config import (
    FIELDS,
    ConfigError,
    build_choice,
    default_config,
    differences,
    flat,
    from_json,
    load_config,
    override,
    parse_arguments,
    to_json,
)

HEADER = "from mha_research.config import default_config\ndef get_config():\n    config = default_config()\n"


def write(folder: pathlib.Path, body: str) -> pathlib.Path:
    path = folder / "my_config.py"
    path.write_text(body, encoding="utf8")
    return path


def test_file_then_overrides(tmp_path: pathlib.Path) -> None:
    file = write(tmp_path, HEADER + "    config.seed = 5\n    config.train.steps = 7\n    return config\n")
    config = load_config(file, {"train.steps": "11"})
    assert (config.seed, config.train.steps) == (5, 11)
    assert flat(config).keys() == FIELDS.keys()


@pytest.mark.parametrize(
    "body,message",
    [
        (
            HEADER + "    config.model.d_modle = 3\n    return config\n",
            r"my_config\.py, line 4: there is no field 'd_modle'; did you mean 'd_model'\?$",
        ),
        (
            HEADER + "    config.model.d_model = 'wide'\n    return config\n",
            r"my_config\.py, line 4: d_model must be int, got a str$",
        ),
        (HEADER + "    return config.to_dict()\n", "must be a ConfigDict made by default_config"),
        ("def get_config(:\n", "line 1: SyntaxError"),
        ("import a_module_that_is_not_there\n", "line 1: ModuleNotFoundError"),
        ("x = 1\n", r"has no function get_config\(\)"),
    ],
)
def test_a_wrong_file_is_one_line_with_its_place(tmp_path: pathlib.Path, body: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(write(tmp_path, body))
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no Python config file '.*absent.py'"):
        load_config(tmp_path / "absent.py")


def test_a_field_of_another_kind_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^model\.attention\.position\.trainable belongs to .*'alibi', but the name is 'rotary'"
    ):
        override(default_config(), {"model.attention.position.trainable": "true"})
    changed = {"model.attention.position.name": "alibi", "model.attention.position.trainable": "true"}
    assert override(default_config(), changed).model.attention.position.trainable is True


def test_build_choice_passes_what_is_set_and_nothing_else() -> None:
    group = override(default_config(), {"optimizer.rule.b2": 0.9}).optimizer.rule
    assert build_choice(group, {"adamw": lambda **fields: fields}, common=1) == {"b2": 0.9, "common": 1}


def test_a_saved_config_reloads_the_same_with_tuples() -> None:
    config = override(default_config(), {"task.test_lengths": "(17, 19)", "optimizer.learning_rate": 1, "seed": 2**40})
    again = from_json(to_json(config))
    assert flat(again) == flat(config)
    assert [type(value) for value in flat(again).values()] == [type(value) for value in flat(config).values()]
    assert again.task.test_lengths == (17, 19)
    with pytest.raises(ConfigError, match="not readable"):
        from_json("{")
    with pytest.raises(ConfigError, match="no field 'sed' in the config; did you mean 'seed'"):
        from_json('{"sed": 1}')


def test_differences_leave_out_how_a_run_is_carried_out() -> None:
    old = default_config()
    new = override(old, {"seed": 3, "run.data_workers": 2, "task.length": 5})
    assert differences(old, new) == {"seed": (0, 3), "task.length": (None, 5)}


def test_arguments() -> None:
    options, overrides = parse_arguments(
        ["--config=a.py", "--workdir", "w", "--config.seed=1", "--config.task.files", "n/*.txt"]
    )
    assert options == {"config": "a.py", "workdir": "w"}
    assert overrides == {"seed": "1", "task.files": "n/*.txt"}
    with pytest.raises(ConfigError, match="--workdir needs a value"):
        parse_arguments(["--workdir"])
    with pytest.raises(ConfigError, match="unexpected argument 'x'"):
        parse_arguments(["x"])


def test_a_file_that_leaves_is_one_line_too(tmp_path: pathlib.Path) -> None:
    for body in ("import sys\nsys.exit(3)\n", HEADER + "    raise SystemExit(3)\n"):
        with pytest.raises(ConfigError, match=r"my_config\.py, line \d: SystemExit: 3"):
            load_config(write(tmp_path, body))


@pytest.mark.parametrize("text", ["[]", "3", '"seed"', "[" * 100_000])
def test_json_that_is_no_config_is_not_readable(text: str) -> None:
    with pytest.raises(ConfigError, match="a saved config is not readable"):
        from_json(text)
