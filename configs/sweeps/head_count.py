"""How many heads does a small character model want?

The question of Vaswani et al. 2017, table 3 (A), at the size of a laptop: the width is fixed, so every arm has the same
parameters and FLOPs, and a head gets narrower as heads get more (d_k = 128, ..., 4). Their whole range is 0.9 BLEU with
one run per row, so the effect to expect is small: an inverted U, flat in its middle.

    python -m experiments.sweep --config=configs/sweeps/head_count.py --workdir=runs/head_count

Cost: 6 arms x (3 rates + 8 seeds) = 66 runs, each of 8.1e12 FLOPs: 5 minutes at 30 GFLOP/s, 5 hours together.
"""

import math

from mha_research.config import default_config
from mha_research.sweeps import AllOf, Claim, Sweep, Tune, vary

METRIC = "test/nats_per_char"
HEADS = (1, 2, 4, 8, 16, 32)


def get_config():
    config = default_config()
    config.task.length = 128
    config.model.num_layers = 2
    config.model.d_model = 128
    config.train.steps = 700
    config.train.batch_size = 32
    config.train.eval_every = 100
    config.train.checkpoint_every = 100
    return config


def trend(*heads):
    """The centred log of the head count; positive where the loss falls with it."""
    middle = sum(map(math.log, heads)) / len(heads)
    return {f"h{h}": middle - math.log(h) for h in heads}


def get_sweep():
    vaswani = "Vaswani et al. 2017, table 3 (A)"
    return Sweep(
        arms=vary("model.attention.num_heads", HEADS, "h{}"),
        seeds=8,
        claims=[
            Claim(text="Eight heads beat one", source=vaswani, metric=METRIC, contrast={"h1": 1, "h8": -1}),
            AllOf(
                [
                    Claim(text="Up to eight, more heads are better", metric=METRIC, contrast=trend(1, 2, 4, 8)),
                    Claim(text="32 heads are too many", metric=METRIC, contrast={"h32": 1, "h8": -1}),
                ],
                text="Quality is an inverted U in the number of heads",
                source=vaswani,
            ),
            Claim(
                text="Between 4 and 16 heads it does not matter",
                source="Conformer, table 6 (A); Differential Transformer, table 6",
                metric=METRIC,
                contrast={"h4": 1, "h16": -1},
                kind="within",
                margin=0.01,
            ),
            Claim(
                text="More heads cost no parameters",
                source="algebra: h matrices of D x D/h are one of D x D",
                metric="parameters",
                contrast={"h32": 1, "h1": -1},
                kind="within",
                margin=1,
            ),
        ],
        tune=Tune("optimizer.learning_rate", (1e-3, 2e-3, 4e-3), seeds=1, metric="valid/nats_per_char"),
        worst={METRIC: 5.0},
    )
