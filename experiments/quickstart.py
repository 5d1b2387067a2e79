"""Train the small character model and draw what came out: `python -m experiments.quickstart --workdir=DIR`.

Beside what `experiments.train` leaves in the directory: loss.png, the loss by step with the simple predictors of the
held-out text, and heads.png, what each head attends to in the beginning of a held-out speech. Further arguments go to
`experiments.train`; on a directory whose run is over only the pictures are drawn again.
"""

import json
import sys
from pathlib import Path
from typing import Any

from experiments import train

CONFIG = Path(__file__).parents[1] / "configs/char_lm.py"
_SHOWN_CHARACTERS = 40


def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit code, that of `experiments.train` when training did not finish."""
    workdir = next((value for name, _, value in (a.partition("=") for a in arguments) if name == "--workdir"), "")
    if code := train.main([f"--config={CONFIG}", *arguments]):
        return code
    for path in draw(Path(workdir)):
        print(f"drawn: {path}")
    return 0


def draw(workdir: Path) -> list[Path]:
    """Writes the pictures of a finished run and returns where they are."""
    from mha_research.analysis.plots import attention_maps, loss_curve
    from mha_research.training.files import read_rows

    baselines = json.loads((workdir / "baselines.json").read_text(encoding="utf8"))["valid"]
    figures = {
        "loss.png": loss_curve(read_rows(workdir / "metrics.jsonl"), baselines, "nats per character"),
        "heads.png": attention_maps(*_heads(workdir)),
    }
    for name, figure in figures.items():
        figure.savefig(workdir / name, dpi=130)
    return [workdir / name for name in figures]


def _heads(workdir: Path) -> tuple[list[Any], list[str]]:
    """What every head of the trained model attends to, (H, L, L) a layer, and the L characters that it reads."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from mha_research.config import from_json
    from mha_research.tasks import CharLM
    from mha_research.training import Checkpoints, build_task
    from mha_research.training.step import build_program

    config = from_json((workdir / "config.json").read_text(encoding="utf8"))
    task = build_task(config)
    assert isinstance(task, CharLM)
    program = build_program(config, task.spec)
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        _, state = checkpoints.restore(program.init(config.seed))
    text = task.corpus.valid[0][:_SHOWN_CHARACTERS]
    tokens = jnp.asarray(task.vocabulary.encode(text), jnp.int32)[None]
    weights = jax.jit(lambda params: program.model(params).attention_weights(tokens))(state["params"])
    return [np.asarray(layer[0]) for layer in weights], [{" ": "\u2423", "\n": "\u21b5"}.get(c, c) for c in text]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
