"""Time of one update: the training loop, its compiled step alone, and the same model plainly in nnx and PyTorch.

    PYTHONPATH=.:kernels python scripts/benchmark_training.py [--rounds=5]

All in one process on the same cores, one after the other in every round; medians over chunks of 20 updates. d_model
128, 2 layers, 4 heads, batch 32 x 128, float32, AdamW, random text. PyTorch is left out where it is not installed.
"""

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from ml_collections import ConfigDict

from mha_research.config import default_config, override
from mha_research.factory import build_task
from mha_research.training import train
from mha_research.training.step import build_program

CHUNK, CHUNKS, VOCABULARY, LENGTH, BATCH, WIDTH, LAYERS, HEADS = 20, 4, 102, 128, 32, 128, 2, 4


def benchmark_config(folder: Path) -> ConfigDict:
    """The model in our config. The text is random, and little of it is held out, for its evaluation is not timed."""
    letters = [chr(ord("0") + i) for i in range(VOCABULARY - 2)]
    (folder / "text.txt").write_text("".join(random.Random(0).choices(letters, k=400_000)), encoding="utf8")
    changes = {
        "task.files": str(folder / "text.txt"),
        "task.valid_fraction": 0.001,
        "task.test_fraction": 0.001,
        "task.length": LENGTH,
        "task.segments": False,
        "model.attention.position.name": "none",
        "model.attention.packed": True,
        "model.position.name": "learned",
        "optimizer.schedule.name": "constant",
        "train.steps": (CHUNKS + 1) * CHUNK,
        "train.log_every": CHUNK,
        "train.eval_every": 10**6,
        "train.checkpoint_every": 10**6,
        "train.batch_size": BATCH,
        "run.baselines": False,
    }
    return override(default_config(), changes)


class PlainBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, use_bias=False, decode=False, rngs=rngs)
        self.hidden = nnx.Linear(WIDTH, 4 * WIDTH, use_bias=False, rngs=rngs)
        self.output = nnx.Linear(4 * WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.norms[0](x), mask=mask)
        return x + self.output(nnx.gelu(self.hidden(self.norms[1](x))))


class PlainModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.table = nnx.Param(0.02 * jax.random.normal(rngs.params(), (LENGTH, WIDTH)))
        self.blocks = nnx.List([PlainBlock(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.table[...][None]
        mask = nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.embed.attend(self.norm(x))


def plain_nnx(batch: dict[str, np.ndarray]) -> Callable[[], list[float]]:
    """Seconds of chunks of updates of the plain nnx model."""
    graphdef, params = nnx.split(PlainModel(nnx.Rngs(0)))
    optimizer = optax.adamw(1e-3)
    state = (params, optimizer.init(params))

    @jax.jit
    def update(state: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            logits = nnx.merge(graphdef, params)(batch["tokens"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

        gradient = jax.grad(loss)(state[0])
        changes, new = optimizer.update(gradient, state[1], state[0])
        return optax.apply_updates(state[0], changes), new

    return timed(update, state, batch)


def timed(update: Callable[[Any, Any], Any], state: Any, batch: Any) -> Callable[[], list[float]]:
    holder = [jax.block_until_ready(update(state, batch))]

    def advance() -> None:
        holder[0] = update(holder[0], batch)

    return lambda: chunks(advance, lambda: jax.block_until_ready(holder[0]))


def chunks(advance: Callable[[], Any], finish: Callable[[], Any] = lambda: None) -> list[float]:
    """Seconds of each of some chunks of updates."""
    seconds = []
    for _ in range(CHUNKS):
        start = time.perf_counter()
        for _ in range(CHUNK):
            advance()
        finish()
        seconds.append(time.perf_counter() - start)
    return seconds


def compiled_step(config: ConfigDict, batch: dict[str, np.ndarray]) -> Callable[[], list[float]]:
    """Seconds of chunks of our compiled update, nothing else."""
    program = build_program(config, build_task(config).spec)
    state = jax.device_put(program.init(0), jax.devices()[0])
    return timed(lambda state, batch: program.update(state, batch)[0], state, batch)


def loop(config: ConfigDict) -> list[float]:
    """Seconds of the chunks of a whole run: data, metrics, log rows and events included, checkpoints left out."""
    with tempfile.TemporaryDirectory() as folder:
        train(config, Path(folder) / "run")
        rows = map(json.loads, (Path(folder) / "run/metrics.jsonl").read_text().splitlines())
        rates = [row["time/steps_per_second"] for row in rows if "time/steps_per_second" in row]
    return [CHUNK / rate for rate in rates[1:]]  # the first chunk waits for the imports of TensorBoard events


def pytorch(batch: dict[str, np.ndarray]) -> Callable[[], list[float]]:
    """Seconds of chunks of updates of the same model in PyTorch with scaled_dot_product_attention."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList([nn.RMSNorm(WIDTH) for _ in range(2)])
            self.packed, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
            self.hidden, self.output = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = self.packed(self.norms[0](x)).view(*x.shape[:2], 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
            attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
            x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
            return x + self.output(functional.gelu(self.hidden(self.norms[1](x)), approximate="tanh"))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.table = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
            self.blocks, self.norm = nn.ModuleList([Block() for _ in range(LAYERS)]), nn.RMSNorm(WIDTH)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens) + self.table
            for block in self.blocks:
                x = block(x)
            return self.norm(x) @ self.embed.weight.T

    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens, targets = (torch.from_numpy(batch[name]).long() for name in ("tokens", "targets"))

    def advance() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()

    return lambda: chunks(advance)


def measure(config: ConfigDict, rounds: int) -> dict[str, float]:
    """Median seconds of one update by program."""
    batch = build_task(config).train_batches(0, BATCH)[0]
    on_device = jax.tree.map(jnp.asarray, batch)
    programs = {
        "training loop": lambda: loop(config),
        "its compiled step": compiled_step(config, on_device),
        "plain nnx": plain_nnx(on_device),
    }
    try:
        programs["PyTorch"] = pytorch(batch)
    except ImportError:
        print("PyTorch is not installed")
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            seconds[name] += program()
    return {name: statistics.median(values) / CHUNK for name, values in seconds.items()}


def main(arguments: list[str]) -> None:
    rounds = int(arguments[0].removeprefix("--rounds=")) if arguments else 5
    with tempfile.TemporaryDirectory() as folder:
        medians = measure(benchmark_config(Path(folder)), rounds)
    for name, seconds in medians.items():
        share = medians["training loop"] / seconds
        print(f"{name:>18}: {1e3 * seconds:7.1f} ms an update; the loop takes {share:.2f} of it")
    print(f"host overhead of the loop: {medians['training loop'] / medians['its compiled step'] - 1:.1%}")


if __name__ == "__main__":
    main(sys.argv[1:])
