"""What `scripts/check_ray` runs: a cluster of two nodes, a node that is killed, and the results of the local engine."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.experiments.interrupting import LONGER, ROOT, XLA_FLAGS, same_as_the_local_engine, start


def main() -> None:
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    import ray
    from ray.cluster_utils import Cluster

    # Workers of Ray inherit what the nodes were started with.
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    os.environ |= {"PYTHONPATH": ":".join(path for path in paths if path), "JAX_PLATFORMS": "cpu"}
    os.environ["XLA_FLAGS"] = XLA_FLAGS
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    node = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    os.environ["RAY_ADDRESS"] = cluster.address
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        here, there = Path(folder, "here"), Path(folder, "there")
        on_ray = start(there, "--executor=ray", *LONGER)
        lost = wait_for_two_running(there, on_ray)
        cluster.remove_node(node, allow_graceful=False)
        out, err = on_ray.communicate(timeout=900)
        print(out, err)
        assert on_ray.returncode == 0, f"the sweep on Ray ended with {on_ray.returncode}"
        cluster.shutdown()
        ray.shutdown()
        starts = [(there / "runs" / name / "provenance.jsonl").read_text().count("\n") for name in lost]
        assert max(starts) > 1, f"the node was killed under {lost}, and none of them started again: {starts}"
        compared = same_as_the_local_engine(there, here)
        print(f"a node was killed under {' and '.join(lost)}; {compared} runs equal to the local engine's")


def wait_for_two_running(workdir: Path, sweep: subprocess.Popen) -> list[str]:
    """The two runs that both have a checkpoint and no result yet."""
    while sweep.poll() is None:
        running = [
            str(path.parent.relative_to(workdir / "runs"))
            for path in workdir.glob("runs/*/*/checkpoints")
            if any(path.glob("[0-9]*")) and not (path.parent / "result.json").exists()
        ]
        if len(running) == 2:
            return running
        time.sleep(0.2)
    sys.exit(f"no two runs were ever under way together: {sweep.communicate()}")


if __name__ == "__main__":
    main()
