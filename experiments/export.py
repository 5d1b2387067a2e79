"""Export runs: `python -m experiments.export --workdir=DIR[,DIR...] --to=TRACKER [--output=WHERE] [--project=NAME]`.

The runs of sweeps, finished or not, or of single runs become runs of a tracker on this machine; nothing is uploaded.
TRACKER is wandb, mlflow, trackio or tensorboard; `--to=safetensors` writes each run's last parameters instead. WHERE
is a folder, DIR/export/TRACKER unless given. The same command again adds only what is new. Exit code: 0, or 2 for a
wrong command, directory or missing package.
"""

import sys

try:
    from experiments.command_line import command_line
except ModuleNotFoundError:  # run as a file, from whose folder nothing is found
    sys.exit("experiments.export: run it from the folder above, as `python -m experiments.export`")
from mha_research.config import ConfigError, parse_arguments

OPTIONS = ("workdir", "to", "output", "project")


def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit code; what went wrong is one line on stderr."""
    if {"--help", "-h"} & set(arguments):
        print(__doc__)
        return 0
    try:
        options, overrides = parse_arguments(arguments)
        if unknown := [name for name in (*options, *overrides) if name not in OPTIONS]:
            raise ConfigError(f"unknown option --{unknown[0]}; --help shows the options")
        for name in ("workdir", "to"):
            if not options.get(name):
                raise ConfigError(f"--{name} is missing; --help shows the options")
        return _export([folder for folder in options.pop("workdir").split(",") if folder], options)
    except (ValueError, OSError) as error:  # ConfigError, ManifestError and ExportError are ValueErrors
        print(f"experiments.export: {error}", file=sys.stderr)
        return 2


def _export(workdirs: list[str], options: dict[str, str]) -> int:
    from mha_research.export import export_runs

    exported = export_runs(*workdirs, **options)  # type: ignore[arg-type]
    for name, steps in exported.steps.items():
        print(f"{name}: {steps} new steps")
    if exported.waiting:
        print(f"not begun: {', '.join(exported.waiting)}")
    print(f"{len(exported.steps)} runs are in {exported.output}")
    return 0


if __name__ == "__main__":
    sys.exit(command_line(main))
