"""Train one model: `python -m experiments.train --config=FILE --workdir=DIR [--config.FIELD=VALUE ...]`.

The same command goes on where an interrupted one stopped. --help lists the fields, with their values in FILE where
that is given. Exit code: 0 finished, 1 diverged or failed, 2 a wrong command, config or directory, 130 and 143 stopped
by Ctrl-C and SIGTERM after a checkpoint.
"""

import logging
import sys
from pathlib import Path

try:
    from experiments.command_line import command_line
except ModuleNotFoundError:  # run as a file, from whose folder nothing is found
    sys.exit("experiments.train: run it from the folder above, as `python -m experiments.train`")
from mha_research.config import ConfigError, load_config, parse_arguments

USAGE = "usage: python -m experiments.train --config=FILE --workdir=DIR [--config.FIELD=VALUE ...]"


def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit code; what went wrong is one line on stderr."""
    if {"--help", "-h"} & set(arguments):
        return _help(arguments)
    try:
        options, overrides = parse_arguments(arguments)
        for name in options.keys() - {"config", "workdir"}:
            raise ConfigError(f"unknown option --{name}; {USAGE}")
        for name in ("config", "workdir"):
            if not options.get(name):
                raise ConfigError(f"--{name} is missing; {USAGE}")
        config = load_config(options["config"], overrides)
    except ConfigError as error:
        return _fail(error, 2)
    return run(config, options["workdir"], overrides)


def run(config, workdir: str, overrides: dict[str, str]) -> int:  # type: ignore[no-untyped-def]
    """Trains, and turns what can happen into an exit code."""
    # Imported late, so that a wrong command line is answered at once.
    import jax

    from mha_research.run_dir import CheckpointError, WorkdirError, read_result
    from mha_research.tasks import TaskError
    from mha_research.training import Interrupted, train, use_compilation_cache

    logging.getLogger("absl").setLevel(logging.ERROR)
    use_compilation_cache()
    try:
        over = read_result(Path(workdir)) is not None
        result = train(config, workdir, overrides)
    except (ConfigError, TaskError, WorkdirError) as error:
        return _fail(error, 2)
    except Interrupted as error:
        return _fail(f"{error}; the same command goes on from there", 128 + error.signal)
    except (CheckpointError, OSError) as error:
        return _fail(error, 1)
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        said = " ".join(str(error).split())[:200]
        return _fail(f"out of memory: lower train.batch_size or raise train.accumulate ({said})", 1)
    if result.status != "finished":
        return _fail(result.message, 1)
    if over:
        print(f"{workdir} was finished already, at step {result.step}")
    return 0


def _fail(error: object, code: int) -> int:
    print(f"experiments.train: {error}", file=sys.stderr)
    return code


def _help(arguments: list[str]) -> int:
    """Every field with its type and its value: that of the config file and the overrides where they are given."""
    from mha_research.config import default_config, flat, known_fields, override
    from mha_research.config.schema import bounds_in_words

    try:
        options, overrides = parse_arguments([word for word in arguments if word not in ("--help", "-h")])
        file = options.get("config")
        values = flat(load_config(file, overrides) if file else override(default_config(), overrides))
    except ConfigError as error:
        return _fail(error, 2)
    print(__doc__)
    for path, field in known_fields(values).items():
        bounds = f", {bounds_in_words(field.bounds)}" if field.bounds else ""
        print(f"  --config.{path}  {field.doc} [{field.describe()}; {values[path]!r}]{bounds}")
    return 0


if __name__ == "__main__":
    sys.exit(command_line(main))
