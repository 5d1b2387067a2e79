"""Report an ablation: `python -m experiments.report --workdir=DIR[,DIR...] [--output=FOLDER]`.

Writes tables (CSV and Parquet), verdicts.json and index.html into DIR/report, or into FOLDER. Several directories of
one sweep, such as its seeds from two machines, are joined. Exit code: 0, or 2 for a wrong command or directory.
"""

import sys
from pathlib import Path

try:
    from experiments.command_line import command_line
except ModuleNotFoundError:  # run as a file, from whose folder nothing is found
    sys.exit("experiments.report: run it from the folder above, as `python -m experiments.report`")
from mha_research.config import ConfigError, parse_arguments


def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit code; what went wrong is one line on stderr."""
    if {"--help", "-h"} & set(arguments):
        print(__doc__)
        return 0
    try:
        options, overrides = parse_arguments(arguments)
        if unknown := [name for name in (*options, *overrides) if name not in ("workdir", "output")]:
            raise ConfigError(f"unknown option --{unknown[0]}; --help shows the options")
        workdirs = [Path(folder) for folder in options.get("workdir", "").split(",") if folder]
        if not workdirs:
            raise ConfigError("--workdir is missing; --help shows the options")
        return _write(workdirs, Path(options.get("output") or workdirs[0] / "report"))
    except (ValueError, OSError) as error:  # ConfigError and ManifestError are ValueErrors
        print(f"experiments.report: {error}", file=sys.stderr)
        return 2


def _write(workdirs: list[Path], folder: Path) -> int:
    from mha_research.analysis.report.report import write_report
    from mha_research.analysis.report.wording import finding, power_of, standing
    from mha_research.analysis.runs import load_runs
    from mha_research.analysis.statistics.claims import AllOf, elementary
    from mha_research.analysis.statistics.comparison import verdicts

    runs = load_runs(*workdirs)
    planned, exploratory = verdicts(runs)
    family = len(list(elementary(verdict.claim for verdict in planned)))
    path = write_report(runs, folder)
    print(f"{standing(runs)}\n{finding(runs, planned)}")
    for run in runs:
        if run.status == "unreadable":
            print(f"{run.name} is left out: {run.failure['reason']}")
    for label, judged in (("", planned), ("exploratory, ", exploratory)):
        for verdict in judged:
            print(f"{label}{verdict.word}: {verdict.claim.text} ({verdict.reason})")
            for part in verdict.parts or (verdict,):
                if not isinstance(part.claim, AllOf) and (power := power_of(part, part.claim, family)):
                    print(f"    {power}")
    print(f"the report is {path}")
    return 0


if __name__ == "__main__":
    sys.exit(command_line(main))
