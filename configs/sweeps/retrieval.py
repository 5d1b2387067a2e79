"""How many heads does it take to look four items up at once?

One layer of attention and a linear read-out, on k-slot retrieval with k = 4. Every head returns one weighted mean of
the values, so with h heads the normalised error cannot come below 1 - min(h, k) / k (see `Retrieval`): 0.75, 0.5 and 0
for one, two and four heads. More than k heads cannot lower that floor; whether they make it easier to reach is the
claim that the theorem does not decide.

    python -m experiments.sweep --config=configs/sweeps/retrieval.py --workdir=runs/retrieval
"""

from mha_research.config import default_config
from mha_research.sweeps import AllOf, Claim, Sweep, vary

METRIC = "test/nmse"


def get_config():
    config = default_config()
    config.task.name = "retrieval"
    config.task.slots = 4
    config.task.evaluation_size = 2048
    config.model.num_layers = 1
    config.model.d_model = 64
    config.model.attention.position.name = "none"
    config.model.attention.implementation = "reference"  # 16 keys: one tile
    config.optimizer.learning_rate = 3e-3
    config.optimizer.rule.weight_decay = 0.0
    config.train.steps = 3000
    config.train.batch_size = 256
    config.train.log_every = 100
    config.train.eval_every = 500
    config.train.checkpoint_every = 1000
    config.run.tensorboard = False
    config.run.head_statistics = True
    return config


def get_sweep():
    return Sweep(
        arms=vary("model.attention.num_heads", (1, 2, 4, 8), "h{}"),
        seeds=8,
        claims=[
            AllOf(
                [
                    Claim(
                        text="A second head takes a quarter of the variance off",
                        metric=METRIC,
                        contrast={"h1": 1, "h2": -1},
                        margin=0.2,
                    ),
                    Claim(
                        text="Two more heads take off another quarter at least",
                        metric=METRIC,
                        contrast={"h2": 1, "h4": -1},
                        margin=0.2,
                    ),
                ],
                text="Up to one head a slot, every head is needed",
                source="the floor 1 - min(h, k) / k of one layer",
            ),
            Claim(
                text="More heads than slots train better",
                source="Liu, Liu and Han 2021: many heads help training rather than capacity",
                metric=METRIC,
                contrast={"h4": 1, "h8": -1},
            ),
        ],
        worst={METRIC: 1.0},
    )
