"""The plan of a sweep, as a person reads it before the runs start."""

from collections.abc import Collection
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mha_research.analysis.manifest import Manifest
from mha_research.analysis.statistics.claims import elementary
from mha_research.analysis.statistics.power import detectable
from mha_research.analysis.statistics.verdict import ALPHA, MIN_SEEDS
from mha_research.sweeps.local import slots
from mha_research.sweeps.progress import duration
from mha_research.sweeps.sizes import sizes, unmatched
from mha_research.sweeps.work import state
from mha_research.training.device import peak_flops


def print_plan(manifest: Manifest, workdir: Path, only: Collection[str], workers: int) -> None:
    """Arms with their size and runs, in what they differ, and a rough time. Builds every model, which may raise."""
    console, found = Console(), sizes(manifest)
    console.print(manifest.title, highlight=False, markup=False, soft_wrap=True)
    table = Table("arm", "runs", "done", "parameters", "FLOPs/step", "steps")
    seconds = 0.0
    peak = peak_flops() / max(1, workers)
    for arm in manifest.arms:
        states = [state(workdir, run) for run in manifest.runs if run.arm == arm]
        if not only or arm in only:
            seconds += states.count("waiting") * found[arm].seconds(peak)
        size = found[arm]
        done = len(states) - states.count("waiting")
        numbers = (len(states), done, f"{size.parameters:,}", f"{size.flops_per_step:.3g}", size.steps)
        table.add_row(arm, *map(str, numbers))
    console.print(table)
    for arm, overrides in manifest.arms.items():  # below the table: in a narrow one they would be cut inside words
        changes = " ".join(f"{path}={value}" for path, value in overrides.items())
        console.print(f"{arm}: {changes or 'the base'}", highlight=False, soft_wrap=True, markup=False)
    for line in unmatched(found) or ["every arm has the same parameters, FLOPs, tokens and steps"]:
        console.print(line, highlight=False)
    waiting = sum(state(workdir, run) == "waiting" for run in manifest.runs if not only or run.arm in only)
    guess = "" if any(slot.accelerator for slot in slots()) else f", about {duration(seconds / max(1, workers))}"
    claims = len(manifest.frozen.claims)
    console.print(
        f"{waiting} runs to do, {workers} at a time{guess} (a guess from FLOPs); "
        f"{claims} claim{'s' * (claims != 1)}, {len(manifest.frozen.seeds)} seeds, frozen as {manifest.frozen.hash}",
        highlight=False,
        soft_wrap=True,
    )
    if claims:
        family = len(list(elementary(manifest.frozen.claims)))
        console.print(power_line(len(manifest.frozen.seeds), family), highlight=False, soft_wrap=True)


def power_line(seeds: int, family: int) -> str:
    """What so many seeds can see, where `family` contrasts are judged; a warning where that is little."""
    if seeds < MIN_SEEDS:
        return f"too few seeds: {seeds} decide nothing, {MIN_SEEDS} are the least"
    least = detectable(seeds, "greater", ALPHA / family)
    warning = "; few seeds, expect inconclusive verdicts" if seeds < 5 else ""
    return f"with {seeds} seeds, 80 % power needs an effect of {least:.2f} standard deviations of its contrast{warning}"
