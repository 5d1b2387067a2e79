"""The runs of a sweep as tasks of a Ray cluster, which retries those whose node or worker was lost.

The sweep's directory must be on a file system that every node sees. Ray is an optional dependency: `pip install
mha_research[ray]`.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mha_research.analysis.manifest import Manifest, PlannedRun
from mha_research.sweeps.plan import SweepError
from mha_research.sweeps.progress import Watch
from mha_research.sweeps.work import record_failure, state
from mha_research.training import Interrupted
from mha_research.training.interrupt import interrupts

MAX_RETRIES = 5


def run_on_ray(
    workdir: Path, manifest: Manifest, runs: Sequence[PlannedRun], watch: Watch, parallel: int | None = None
) -> None:
    """Runs everything in `runs` on the cluster of RAY_ADDRESS, or on a new one of this machine.

    A run that was lost with its node resumes from its last checkpoint elsewhere. Raises SweepError when Ray is missing,
    and Interrupted when a signal came.
    """
    try:
        import ray
    except ImportError:
        raise SweepError("--executor=ray needs Ray: pip install 'mha_research[ray]'") from None
    if not ray.is_initialized():
        ray.init(
            address=os.environ.get("RAY_ADDRESS"),
            log_to_driver=False,
            include_dashboard=False,
            runtime_env={"env_vars": {"PYTHONPATH": ":".join(path or str(Path.cwd()) for path in sys.path)}},
        )
    # Ray counts a retry for a lost node or a killed worker; what a run raises itself is its result.
    task = ray.remote(num_cpus=1, num_gpus=_gpus_per_run(ray), max_retries=MAX_RETRIES)(_one)
    waiting = list(runs)
    running: dict[Any, PlannedRun] = {}
    with interrupts() as flag:
        while waiting or running:
            while waiting and len(running) < (parallel or len(runs)):
                run = waiting.pop(0)
                watch.tell(run, None)
                running[task.remote(str(workdir.absolute()), run.name)] = run
            ready, _ = ray.wait(list(running), timeout=1.0)
            for reference in ready:
                run = running.pop(reference)
                try:
                    watch.tell(run, ray.get(reference))
                except ray.exceptions.RayError as error:
                    record_failure(workdir, run, f"Ray gave it up: {' '.join(str(error).split())[:300]}")
                    watch.tell(run, state(workdir, run))
            if flag.signal:
                for reference in running:
                    ray.cancel(reference)
                raise Interrupted("the sweep was stopped", flag.signal)


def _gpus_per_run(ray: Any) -> int:
    return int(ray.cluster_resources().get("GPU", 0) > 0)


def _one(workdir: str, name: str) -> str:
    """One run, in a worker of Ray."""
    from mha_research.sweeps.work import do
    from mha_research.training import use_compilation_cache

    use_compilation_cache()
    manifest = Manifest.read(Path(workdir))
    return do(Path(workdir), manifest, next(run for run in manifest.runs if run.name == name))
