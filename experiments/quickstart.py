"""A small real ablation, from nothing to its answer: `python -m experiments.quickstart --workdir=DIR`.

One, two, four and eight heads on real speeches, three seeds (configs/sweeps/quickstart.py), run as `experiments.sweep`
runs any sweep: stopped half-way the same command goes on, and finished runs are not repeated. It ends with held-out
losses beside simple predictors, a sample, pictures, the report, and what became of the claims.
--config.FIELD=VALUE changes the base of all arms.
"""

import functools
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

try:
    from experiments.command_line import command_line
except ModuleNotFoundError:  # run as a file, from whose folder nothing is found
    sys.exit("experiments.quickstart: run it from the folder above, as `python -m experiments.quickstart`")
from experiments import report, sweep
from mha_research.config import ConfigError, parse_arguments

CONFIG = Path(__file__).parents[1] / "configs/sweeps/quickstart.py"
_BASELINES = {
    "uniform": "a uniform guess",
    "unigram": "character frequencies",
    "bz2": "bz2 of that text alone",
    "bz2_primed": "bz2 after training text",
}
_SHOWN_CHARACTERS = 40
_SAMPLE_LENGTH = 300


def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit code; what went wrong is one line on stderr."""
    if {"--help", "-h"} & set(arguments):
        print(__doc__)
        return 0
    try:
        options, overrides = parse_arguments(arguments)
        if set(options) != {"workdir"}:
            raise ConfigError(f"takes --workdir=DIR and --config.FIELD=VALUE; got {' '.join(arguments) or 'nothing'}")
        if overrides.get("model.attention.kind", "multi_head") != "multi_head":
            raise ConfigError(
                "it draws plain heads and samples from them; see configs/sweeps/variants.py for other kinds"
            )
    except ConfigError as error:
        print(f"experiments.quickstart: {error}", file=sys.stderr)
        return 2
    if code := sweep.main([f"--config={CONFIG}", *arguments]):
        return code
    workdir = Path(options["workdir"])
    try:
        paths = show(workdir)
    except (ValueError, OSError) as error:
        print(f"experiments.quickstart: {error}", file=sys.stderr)
        return 1
    if code := report.main([f"--workdir={workdir}"]):
        return code
    for path in paths:
        print(f"drawn: {path}")
    print(f"everything lies in {workdir}")
    return 0


def show(workdir: Path) -> list[Path]:
    """Prints the table of a finished sweep of characters and a sample of its best run; returns where its pictures are.

    Raises ValueError for another task or where no run finished, and OSError when a file cannot be read or written.
    """
    from mha_research.analysis import load_runs, plot_effect
    from mha_research.run_dir.files import write_atomically

    runs = load_runs(workdir)
    finished = [run for run in runs.main() if run.status == "finished"]
    if not finished:
        raise ValueError(f"no run in {workdir} finished")
    best = min(finished, key=lambda run: run.value("valid/nats_per_char"))
    simple = workdir / "baselines.json"
    if not simple.exists():
        write_atomically(simple, json.dumps(_load(best.path)[1].baselines(), indent=2) + "\n")
    _print_table(runs, json.loads(simple.read_text(encoding="utf8")))
    sample = best.path / "sample.txt"
    if not sample.exists():
        write_atomically(sample, _sample(best.path) + "\n")
    print(f"\nWhat {best.name}, the best run and the one that is drawn, writes:\n\n{sample.read_text(encoding='utf8')}")
    pictures = [best.path / name for name in ("loss.png", "heads.png")]
    if not all(path.exists() for path in pictures):
        draw(best.path, json.loads(simple.read_text(encoding="utf8"))["valid"])
    effect = workdir / "effect.png"
    plot_effect(runs, "test/nats_per_char", runs.arms[0]).savefig(effect, dpi=200, facecolor="white")
    return [effect, *pictures]


def draw(workdir: Path, baselines: Mapping[str, float] | None = None) -> list[Path]:
    """Writes the pictures of one finished run of a character model into its directory and returns where they are.

    loss.png, the loss by step with the simple predictors (those of the run's baselines.json unless given); heads.png,
    what each head attends to in the beginning of a held-out document. Raises ValueError for another task, and OSError
    when a file cannot be read or written.
    """
    from mha_research.analysis.report.plots import attention_maps, loss_curve
    from mha_research.run_dir.files import read_rows

    simple = workdir / "baselines.json"
    if baselines is None and simple.exists():
        baselines = json.loads(simple.read_text(encoding="utf8"))["valid"]
    figures = {
        "loss.png": loss_curve(read_rows(workdir / "metrics.jsonl"), baselines or {}, "nats per character"),
        "heads.png": attention_maps(*_heads(workdir)),
    }
    for name, figure in figures.items():
        figure.savefig(workdir / name, dpi=130)
    return [workdir / name for name in figures]


def _print_table(runs: Any, baselines: Mapping[str, Mapping[str, float]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from mha_research.analysis.statistics.comparison import values

    valid, test = (values(runs, f"{split}/nats_per_char") for split in ("valid", "test"))
    seeds = len(valid)
    table = Table("loss per character", "valid, nats", "bits", "test, nats", "bits")
    for arm in runs.arms:
        cells = [(f"{x.mean():.3f} ± {x.std():.3f}", f"{x.mean() / math.log(2):.3f}") for x in (valid[arm], test[arm])]
        table.add_row(f"{arm}, {seeds} seeds", *cells[0], *cells[1])
    table.add_section()
    for name, text in _BASELINES.items():
        nats = [baselines[split][name] for split in ("valid", "test")]
        table.add_row(text, *(f"{loss / unit:.3f}" for loss in nats for unit in (1, math.log(2))))
    Console().print(table)
    print("mean ± standard deviation over seeds, on the validation and the test text")


@functools.lru_cache(maxsize=1)
def _load(workdir: Path) -> tuple[Any, Any, Any]:
    """(config, task, trained model) of a finished run of a character model."""
    from mha_research.analysis.restore import restore
    from mha_research.config import from_json
    from mha_research.factory import build_task
    from mha_research.tasks import CharLM

    config = from_json((workdir / "config.json").read_text(encoding="utf8"))
    task = build_task(config)
    if not isinstance(task, CharLM):
        raise ValueError(f"the heads are drawn over characters; {workdir} holds a run of task {config.task.name!r}")
    return config, task, restore(workdir)


def _sample(workdir: Path) -> str:
    from mha_research.config import override
    from mha_research.training.sample import generate

    config, task, model = _load(workdir)
    return generate(override(config, {"run.sample_length": _SAMPLE_LENGTH}), task, model)


def _heads(workdir: Path) -> tuple[list[Any], list[str]]:
    """What every head of the trained model attends to, (H, L, L) a layer, and the L characters that it reads."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    _, task, model = _load(workdir)
    text = task.corpus.valid[0][:_SHOWN_CHARACTERS]
    tokens = jnp.asarray(task.vocabulary.encode(text), jnp.int32)[None]
    graphdef, state = nnx.split(model)
    weights = jax.jit(lambda state: nnx.merge(graphdef, state).attention_weights(tokens))(state)
    return [np.asarray(layer[0]) for layer in weights], [{" ": "\u2423", "\n": "\u21b5"}.get(c, c) for c in text]


if __name__ == "__main__":
    sys.exit(command_line(main))
