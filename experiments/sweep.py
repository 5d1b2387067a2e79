"""Run an ablation: `python -m experiments.sweep --config=configs/sweeps/head_count.py --workdir=DIR`.

The same command goes on where it stopped; finished runs are not repeated. Without --config it goes on with what DIR
planned.

  --config=FILE         a sweep file, with get_config() and get_sweep()
  --config.FIELD=VALUE  changes the base of all arms
  --workdir=DIR         where the sweep lives
  --dry_run             prints the plan and creates nothing
  --only=ARM[,ARM]      runs these arms only
  --max_parallel=N      at most N runs at once
  --quick               a rehearsal: few steps, small batches, two seeds, no tuning (give it a directory of its own)
  --retry_failed        tries failed runs again
  --executor=local      this machine (default); slurm: one sbatch array; ray: a Ray cluster
  --sbatch=OPTIONS      further options for sbatch, as one text
  --run=NAME            one run of the manifest, as the engines call it

Exit code: 0 every run ended, diverged ones included; 1 some failed; 2 a wrong command, file or directory; 130 and 143
stopped by Ctrl-C and SIGTERM, with every run saved.
"""

import argparse
import dataclasses
import shlex
import sys
from pathlib import Path
from typing import Any, NoReturn

try:
    from experiments.command_line import command_line
except ModuleNotFoundError:  # run as a file, from whose folder nothing is found
    sys.exit("experiments.sweep: run it from the folder above, as `python -m experiments.sweep`")
from mha_research.config import ConfigError, parse_arguments


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help shows the options")


def _parser() -> _Parser:
    parser = _Parser(prog="experiments.sweep", allow_abbrev=False, add_help=False)
    for name in ("config", "workdir", "only", "run"):
        parser.add_argument(f"--{name}", type=_text)
    parser.add_argument("--sbatch", type=shlex.split, default=[])
    parser.add_argument("--executor", default="local", choices=("local", "slurm", "ray"))
    parser.add_argument("--max_parallel", type=int, default=None)
    for name in ("dry_run", "quick", "retry_failed"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser


def _text(value: str) -> str:
    """Refuses what an unset variable of a shell leaves: `--run=` must not run everything."""
    if not value.strip(", "):
        raise argparse.ArgumentTypeError("it is empty")
    return value


def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit code; what went wrong is one line on stderr."""
    if {"--help", "-h"} & set(arguments):
        print(__doc__)
        return 0
    try:
        options, rest = _parser().parse_known_args(arguments)
        unknown, overrides = parse_arguments(rest)
        if unknown:
            raise ConfigError(f"unknown option --{next(iter(unknown))}; --help shows the options")
        if not options.workdir:
            raise ConfigError("--workdir is missing; --help shows the options")
        if (overrides or options.quick) and not options.config:
            raise ConfigError("--config.FIELD=VALUE and --quick need --config=FILE")
        if options.run and (options.config or options.only or options.retry_failed or options.dry_run):
            raise ConfigError("--run makes one run of the manifest, and takes no option but --workdir")
        if options.max_parallel is not None and options.max_parallel < 1:
            raise ConfigError(f"--max_parallel is 1 or more; got {options.max_parallel}")
    except ConfigError as error:
        return _fail(error, 2)
    return _one(options) if options.run else _sweep(options, overrides)


def _sweep(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    # Imported late, so that a wrong command line is answered at once.
    import jax

    from mha_research.analysis.manifest import FILE, Manifest, ManifestError
    from mha_research.run_dir import WorkdirError
    from mha_research.sweeps.engines import engine_for
    from mha_research.sweeps.launch import opened, run_sweep
    from mha_research.sweeps.plan import SweepError, extend, load_sweep, plan, shrink
    from mha_research.sweeps.show import print_plan
    from mha_research.tasks import TaskError
    from mha_research.training import Interrupted

    jax.config.update("jax_platforms", "cpu")  # planning needs no accelerator, and must not take one from the workers
    workdir = Path(options.workdir)
    try:
        wanted = None
        if options.config:
            title, base, sweep = load_sweep(options.config, overrides)
            if options.quick:
                base, sweep = shrink(base, sweep)
            wanted = plan(title, options.config, base, sweep)
            changes = [f"--config.{field}={value}" for field, value in overrides.items()]
            wanted = dataclasses.replace(wanted, options=changes + ["--quick"] * options.quick)
        manifest = Manifest.read(workdir) if wanted is None or (workdir / FILE).exists() else wanted
        manifest = extend(manifest, wanted) if wanted else manifest
        only = [arm for arm in (options.only or "").split(",") if arm]
        if unknown := [arm for arm in only if arm not in manifest.arms]:
            raise SweepError(f"--only names the arm {unknown[0]!r}; there are {', '.join(manifest.arms)}")
        engine, workers = engine_for(options.executor, manifest, options.max_parallel, options.sbatch)
        print_plan(manifest, workdir, only, workers)
        if options.dry_run:
            return 0
        with opened(workdir, wanted) as manifest:
            watch = run_sweep(workdir, manifest, engine, workers, only, options.retry_failed)
    except (ConfigError, SweepError, ManifestError, TaskError, WorkdirError) as error:
        return _fail(error, 2)
    except Interrupted as error:
        return _fail(f"{error}; the same command goes on from there", 128 + error.signal)
    except OSError as error:
        return _fail(error, 1)
    print(f"python -m experiments.report --workdir={workdir} writes the report")
    if watch.failed:
        return _fail(f"{watch.failed} runs failed; see {workdir / 'failures'}, and --retry_failed tries them again", 1)
    return 0


def _one(options: argparse.Namespace) -> int:
    from mha_research.analysis.manifest import Manifest, ManifestError
    from mha_research.run_dir import WorkdirError
    from mha_research.sweeps.work import do
    from mha_research.training import Interrupted, use_compilation_cache

    workdir = Path(options.workdir)
    try:
        manifest = Manifest.read(workdir)
    except (ManifestError, OSError) as error:
        return _fail(error, 2)
    run = next((run for run in manifest.runs if run.name == options.run), None)
    if run is None:
        return _fail(f"--run names {options.run!r}, which is not in the manifest of {workdir}", 2)
    use_compilation_cache()
    try:
        ended = do(workdir, manifest, run)
    except Interrupted as error:
        return _fail(f"{error}; the same command goes on from there", 128 + error.signal)
    except (WorkdirError, OSError) as error:
        return _fail(error, 1)
    print(f"{run.name} {ended}")
    return int(ended == "failed")


def _fail(error: Any, code: int) -> int:
    print(f"experiments.sweep: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(command_line(main))
