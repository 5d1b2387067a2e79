"""Does recall need many heads?

It should not: one head of the second layer finds what followed last time. Sequences of random symbols whose second half
repeats the first (the `induction` task). Multi-query recall is solved by one head in Zoology (Arora et al. 2023), so
the claim is of no difference, with a margin fixed beforehand.

    python -m experiments.sweep --config=configs/sweeps/recall.py --workdir=runs/recall

Cost: 4 arms x 8 seeds = 32 runs, each of 1.4e12 FLOPs: a minute at 30 GFLOP/s, half an hour together.
"""

from mha_research.config import default_config
from mha_research.sweeps import Claim, Sweep, vary

METRIC = "test/accuracy"


def get_config():
    config = default_config()
    config.task.name = "induction"
    config.task.length = 64
    config.task.vocabulary_size = 32
    config.model.num_layers = 2
    config.model.d_model = 64
    config.optimizer.learning_rate = 3e-3
    config.train.steps = 1000
    config.train.batch_size = 32
    return config


def get_sweep():
    return Sweep(
        arms=vary("model.attention.num_heads", (1, 2, 4, 8), "h{}"),
        seeds=8,
        claims=[
            Claim(
                text=f"{heads} heads recall no better than one",
                source="Arora et al. 2023, Zoology: one head solves multi-query recall",
                metric=METRIC,
                contrast={f"h{heads}": 1, "h1": -1},
                kind="within",
                margin=0.01,
            )
            for heads in (2, 8)
        ],
        worst={METRIC: 1 / 32},
    )
