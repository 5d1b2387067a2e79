"""What each arm costs before it runs: parameters, FLOPs, tokens; and in what arms are not matched."""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from mha_research.analysis.manifest import Manifest
from mha_research.analysis.runs import SIZES, source_of
from mha_research.analysis.statistics.claims import elementary
from mha_research.config import ConfigError, differences, override
from mha_research.factory import build_task
from mha_research.sweeps.plan import SweepError, base_config
from mha_research.tasks import Task
from mha_research.training import dry_run
from mha_research.training.step import build_program
from mha_research.training.summary import flops_per_step

# Small models reach a small part of a device's peak; a plan needs the order of magnitude.
_SHARE_OF_PEAK = 0.2
_SECONDS_TO_COMPILE = 5.0


@dataclasses.dataclass(frozen=True)
class Size:
    """One run of an arm: number of parameters, FLOPs of a step, tokens of a step, steps."""

    parameters: int
    flops_per_step: int
    tokens_per_step: int
    steps: int

    def seconds(self, peak: float) -> float:
        """A rough time of one run, from FLOPs and the device's peak."""
        return _SECONDS_TO_COMPILE + self.flops_per_step * self.steps / (_SHARE_OF_PEAK * peak)


def arm_configs(manifest: Manifest) -> dict[str, ConfigDict]:
    """Every arm's config, with the first value of the tuning grid where there is one."""
    base, tune = base_config(manifest), manifest.frozen.tune
    chosen = {tune["field"]: tune["values"][0]} if tune else {}
    return {arm: override(base, {**overrides, **chosen}) for arm, overrides in manifest.arms.items()}


def sizes(manifest: Manifest) -> dict[str, Size]:
    """Arm -> size. Builds each arm's model without arrays.

    Raises SweepError naming the arm whose model cannot be built, or a metric that an arm will not have.
    """
    tasks: list[tuple[ConfigDict, Any]] = []
    found = {}
    for arm, config in arm_configs(manifest).items():
        task = next((task for other, task in tasks if _same_task(other, config)), None)
        if task is None:
            task = build_task(config)
            tasks.append((config, task))
            _check_metrics(manifest, arm, task)
        try:
            dry_run(config, task, update=False)
            program = build_program(config, task.spec)
        except ConfigError as error:
            raise SweepError(f"arm {arm!r}: {error}") from None
        tokens = config.train.batch_size * task.spec.length
        found[arm] = Size(program.parameters, flops_per_step(config, program), tokens, config.train.steps)
    return found


def _check_metrics(manifest: Manifest, arm: str, task: Task) -> None:
    """What is asked of a run must be among what its task reports, or the answer comes after the last run: nothing."""
    names = [name.partition("@") for name in task.evaluations()]
    known = [f"{split}/{metric}{at}{n}" for split, at, n in names for metric in task.metrics(1.0, 1.0)]
    tune = manifest.frozen.tune
    asked = [("claim", claim.metric) for claim in elementary(manifest.frozen.claims)]
    asked += [("Sweep.worst", metric) for metric in manifest.frozen.worst]
    asked += [("Tune.metric", tune["metric"])] if tune else []
    for where, metric in asked:
        source = source_of(metric)
        if source in known or source in SIZES or source.startswith(("time/", "train/", "heads/")):
            continue
        close = difflib.get_close_matches(source, [*known, *SIZES], n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"
        raise SweepError(f"arm {arm!r} reports no {source!r}, which a {where} asks for; {hint}")


def _same_task(a: ConfigDict, b: ConfigDict) -> bool:
    return not any(path.startswith("task.") for path in differences(a, b))


def unmatched(found: Mapping[str, Size]) -> list[str]:
    """One line for each quantity in which the arms differ."""
    lines = []
    for field in dataclasses.fields(Size):
        values = {arm: getattr(size, field.name) for arm, size in found.items()}
        low, high = min(values.values()), max(values.values())
        if low != high:
            by = f"by {100 * (high / low - 1):.1f} %" if low else ""
            lines.append(f"{field.name.replace('_', ' ')} differ {by}: {low:,} to {high:,}")
    return lines
