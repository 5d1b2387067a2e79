"""Does the kind of position matter, within and beyond the length that was trained?

Trained at 64 characters and scored at 64, 128 and 256. Press et al. 2022 train at 512 and longer: ALiBi goes on to 15
thousand tokens, rotary positions last a hundred or two beyond the training length, learned ones none.

    python -m experiments.sweep --config=configs/sweeps/positions.py --workdir=runs/positions

Cost: 4 arms x (3 rates + 8 seeds) = 44 runs, each of 7.6e12 FLOPs: 4 minutes at 30 GFLOP/s, 3 hours together.
"""

from mha_research.config import default_config
from mha_research.sweeps import Claim, Sweep, Tune

METRIC = "test/nats_per_char"


def get_config():
    config = default_config()
    config.task.length = 64
    config.task.test_lengths = (128, 256)
    config.model.num_layers = 2
    config.model.d_model = 128
    config.train.steps = 700
    config.train.batch_size = 64
    config.train.eval_every = 100
    config.train.checkpoint_every = 100
    return config


def get_sweep():
    inside, beside = "model.attention.position.name", "model.position.name"
    press = "Press et al. 2022"
    return Sweep(
        arms={
            "none": {inside: "none"},
            "sinusoidal": {inside: "none", beside: "sinusoidal"},
            "rotary": {inside: "rotary"},
            "alibi": {inside: "alibi"},
        },
        seeds=8,
        claims=[
            Claim(
                text="At the trained length, ALiBi and rotary positions are equally good",
                source=press,
                metric=METRIC,
                contrast={"rotary": 1, "alibi": -1},
                kind="within",
                margin=0.02,
            ),
            Claim(
                text="At four times that length, ALiBi is better than rotary positions",
                source=press,
                metric=f"{METRIC}@256",
                contrast={"rotary": 1, "alibi": -1},
            ),
            Claim(
                text="At four times that length, sinusoidal positions fall further behind ALiBi than rotary ones",
                source=press,
                metric=f"{METRIC}@256",
                contrast={"sinusoidal": 1, "rotary": -1},
            ),
        ],
        tune=Tune("optimizer.learning_rate", (1e-3, 2e-3, 4e-3), seeds=1, metric="valid/nats_per_char"),
        worst={METRIC: 5.0},
    )
