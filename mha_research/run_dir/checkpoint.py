"""Durable states: every save either happened or raised, and what is restored is exactly what was saved.

Orbax writes a step into a temporary folder and renames it when it is complete, so a kill or a full disk in the middle
of a save leaves the earlier steps whole.
"""

import contextlib
import io
import json
import logging
import math
import re
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies


class CheckpointError(RuntimeError):
    """A state could not be saved or restored. The message names the step and what is wrong with it."""


class Checkpoints:
    """The saved steps of a run: the last `keep_last`, and the best by the smallest `best_metric` where it was measured.

    A step holds `state` (a pytree of arrays and keys, typed or raw), `config` (readable JSON) and `metrics`.
    Raises CheckpointError, as every method does, for a directory that is none or that holds damaged metrics.
    """

    def __init__(self, directory: Path, keep_last: int = 2, best_metric: str = "valid/loss") -> None:
        self.directory, self._best_metric = directory.absolute(), best_metric
        if self.directory.exists() and not self.directory.is_dir():
            raise CheckpointError(f"{self.directory} is no directory, so no checkpoint can lie in it")
        try:
            self._manager = self._open(keep_last)
        except Exception as error:
            raise CheckpointError(f"the checkpoints in {self.directory} cannot be read: {_reason(error)}") from error

    def _open(self, keep_last: int) -> ocp.CheckpointManager:
        best_metric = self._best_metric
        return ocp.CheckpointManager(
            self.directory,
            item_handlers={"state": ocp.StandardCheckpointHandler(), "config": ocp.JsonCheckpointHandler()},
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policies.AnyPreservationPolicy(
                    [
                        policies.LatestN(keep_last),
                        policies.BestN(
                            get_metric_fn=lambda metrics: -metrics[best_metric],
                            n=1,
                            keep_checkpoints_without_metrics=False,
                        ),
                    ]
                ),
                best_fn=lambda metrics: metrics[best_metric],  # without one, Orbax does not store metrics
                best_mode="min",
                # A save that fails must raise here and not at some later call.
                enable_async_checkpointing=False,
                cleanup_tmp_directories=True,
            ),
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: Any) -> None:
        self._manager.close()

    def steps(self) -> list[int]:
        """Every step that is complete, in numeric order."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, config_json: str, metrics: dict[str, float] | None = None) -> str:
        """Saves and says so in one line. Raises CheckpointError when the step did not reach the disk.

        A step at or below the newest is refused: what is on disk is never replaced. Metrics that are not finite are
        left out, and a step without a finite `best_metric` is never the best.
        """
        metrics = {name: value for name, value in (metrics or {}).items() if math.isfinite(value)}
        newest = max(self.steps(), default=-1)
        if step <= newest:
            raise CheckpointError(f"step {step} was not saved: {self.directory} already holds step {newest}")
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state), config=ocp.args.JsonSave(json.loads(config_json))
        )
        try:
            with _one_report():
                saved = self._manager.save(
                    step, args=items, metrics=metrics if self._best_metric in metrics else None, force=True
                )
                self._manager.wait_until_finished()
        except Exception as error:
            raise CheckpointError(f"step {step} was not saved in {self.directory}: {_reason(error)}") from error
        if not saved or step not in self.steps():
            raise CheckpointError(f"step {step} was not saved in {self.directory}: the checkpoint manager declined")
        return f"saved step {step}; steps on disk: {', '.join(map(str, self.steps()))}"

    def restore(self, like: Any, step: int | None = None) -> tuple[int, Any]:
        """The newest step, or the given one, and its state in the structure, shapes, types and placement of `like`.

        Raises FileNotFoundError when there is none, and CheckpointError naming the path of a parameter that is missing,
        extra, or of another shape or type.
        """
        step = max(self.steps(), default=None) if step is None else step
        if step is None or step not in self.steps():
            raise FileNotFoundError(f"no checkpoint {'' if step is None else f'of step {step} '}in {self.directory}")
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        try:
            saved = self._manager.item_metadata(step)["state"]
            if wrong := tree_differences(saved.tree if hasattr(saved, "tree") else saved, abstract):
                raise CheckpointError(f"step {step} in {self.directory} does not fit the model: {'; '.join(wrong)}")
            restored = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract)))
        except CheckpointError:
            raise
        except Exception as error:
            earlier = max((other for other in self.steps() if other < step), default=None)
            way = "" if earlier is None else f"; with {self.directory / str(step)} moved away, step {earlier} is next"
            raise CheckpointError(
                f"step {step} in {self.directory} cannot be restored: {_reason(error)}{way}"
            ) from error
        # Orbax does not compare typed with raw keys.
        for (path, new), old in zip(jax.tree_util.tree_leaves_with_path(like), jax.tree.leaves(restored["state"])):
            if new.dtype != old.dtype:
                raise CheckpointError(
                    f"step {step}: {_name(path)} is {old.dtype} in the checkpoint and {new.dtype} in the model"
                )
        return step, restored["state"]

    def metrics(self, step: int) -> dict[str, float] | None:
        """What was measured at a saved step."""
        return self._manager.metrics(step)


@contextlib.contextmanager
def _one_report() -> Iterator[None]:
    """Keeps threads of Orbax and TensorStore from printing tracebacks of an error that is raised here as well.

    Some of them go on after it, and find their event loop closed: what threads that Python did not start, and
    coroutines that nobody waits for, have to say of it is not printed afterwards either.
    """
    logger, stderr = logging.getLogger("absl"), sys.stderr
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    sys.stderr = io.StringIO()
    try:
        yield
    except BaseException:
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        stderr = _FromPython(stderr)
        raise
    finally:
        sys.stderr = stderr
        logger.setLevel(level)


class _FromPython(io.TextIOBase):
    """A text stream to which only threads that Python started can write."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if not isinstance(threading.current_thread(), threading._DummyThread):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


def tree_differences(saved: Any, wanted: Any, limit: int = 5) -> list[str]:
    """Where two trees of arrays differ in structure, shape or type: one line a path, at most `limit`."""
    old, new = _leaves(saved), _leaves(wanted)
    lines = [f"{path} is in the checkpoint only" for path in old if path not in new]
    lines += [f"{path} is missing from the checkpoint" for path in new if path not in old]
    for path in new:
        if path in old and old[path] != new[path]:
            lines.append(f"{path} is {_named(old[path])} in the checkpoint and {_named(new[path])} in the model")
    return lines[:limit] + ([f"and {len(lines) - limit} more"] if len(lines) > limit else [])


def _leaves(tree: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and type by path; a typed key counts as the raw one that it is saved as."""
    leaves = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = _name(path)
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, leaf)
        leaves[name] = (tuple(leaf.shape), np.dtype(leaf.dtype).name)
    return leaves


def _name(path: tuple[Any, ...]) -> str:
    """`params/blocks/0/norm/scale`, however the tree's containers call their parts."""
    return "/".join(str(getattr(part, "key", getattr(part, "idx", getattr(part, "name", part)))) for part in path)


def _named(leaf: tuple[tuple[int, ...], str]) -> str:
    return f"{leaf[1]}{list(leaf[0])}"


def _reason(error: BaseException) -> str:
    """The innermost cause in one line: Orbax wraps what the disk said several times. Of long paths the last part."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = re.sub(r'"/[^"]*/([^"/]+/?)"', r'"\1"', " ".join(str(error).split()))
    return f"{type(error).__name__}: {text[:300]}"
