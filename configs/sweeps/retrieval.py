"""Can one head look four items up at once?

Not in one layer: every head returns one weighted mean of the values, so with h heads the normalised error cannot come
below 1 - min(h, 4) / 4, which is 0.75, 0.5 and 0 for one, two and four (`Retrieval` has the proof). What the theorem
leaves open is asked here: whether training reaches those floors, whether layers of one head do what heads of one layer
do, and whether more heads than items help to train. The arms have the same parameters and FLOPs.

    python -m experiments.sweep --config=configs/sweeps/retrieval.py --workdir=runs/retrieval

Cost: 5 arms x 8 seeds = 40 runs, each of 4.0e11 FLOPs. Small products and drawing the examples take most of the time.
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
    config.model.attention.position.name = "none"  # the items are a set
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


def lower(text, arm, other, **known):
    """The claim that the error of `arm` is larger than that of the `other`, by more than a margin."""
    return Claim(text=text, metric=METRIC, contrast={arm: 1, other: -1}, **known)


def get_sweep():
    heads = "model.attention.num_heads"
    above = {"model.num_layers": 4, heads: 1, "model.attention.head_dim": 16}  # as wide together as h4
    liu = "Liu, Liu and Han 2021: layers of one head attend to many positions too; many heads make training stable"
    return Sweep(
        arms=vary(heads, (1, 2, 4, 8), "h{}") | {"h1-l4": above},
        seeds=8,
        claims=[
            AllOf(
                [
                    lower("A second head finds a quarter of the values more", "h1", "h2", margin=0.2),
                    lower("Two more heads find another quarter or more", "h2", "h4", margin=0.2),
                ],
                text="In one layer every head is needed, up to one for each item",
                source="Vaswani et al. 2017, section 3.2.2: with a single head, averaging inhibits this",
            ),
            lower("Four layers of one head pass the floor of one layer", "h1", "h1-l4", margin=0.2, source=liu),
            lower("More heads than items are easier to train", "h4", "h8", source=liu),
        ],
        worst={METRIC: 1.0},
    )
