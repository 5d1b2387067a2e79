"""The engine behind `--executor`."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from mha_research.analysis.manifest import Manifest, PlannedRun
from mha_research.analysis.statistics.claims import elementary
from mha_research.sweeps.launch import Engine
from mha_research.sweeps.local import run_locally, slots
from mha_research.sweeps.plan import SweepError
from mha_research.sweeps.progress import Watch


def engine_for(
    name: str, manifest: Manifest, parallel: int | None = None, sbatch: Sequence[str] = ()
) -> tuple[Engine, int]:
    """The engine and how many runs it has at once. Claims about time are measured with one run at a time.

    Raises SweepError for an engine that is not installed, or that cannot measure what is claimed.
    """
    timed = any(claim.metric.startswith("time/") for claim in elementary(manifest.frozen.claims))
    if timed and (name != "local" or (parallel or 1) > 1):
        raise SweepError("claims about time/ need --executor=local and one run at a time")
    if name == "slurm":
        from mha_research.sweeps.slurm import run_on_slurm

        return partial(run_on_slurm, options=tuple(sbatch), parallel=parallel), parallel or 1
    if name == "ray":
        from mha_research.sweeps.on_ray import run_on_ray

        return partial(run_on_ray, parallel=parallel), parallel or 1
    parallel = 1 if timed else parallel

    def local(workdir: Path, manifest: Manifest, runs: Sequence[PlannedRun], watch: Watch) -> None:
        run_locally(workdir, manifest, runs, parallel, watch.tell, mixed=timed)

    return local, len(slots(parallel))
