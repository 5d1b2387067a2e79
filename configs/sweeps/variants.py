"""Which other kinds of attention change a small model of speeches, and is the effect real?

Plain attention beside five kinds that a paper calls better, as good or cheaper. All read positions as rotary ones and
are as wide; the arms are not matched, and the plan says by how much: convolved values have more parameters, and at 64
characters the Performer's estimate costs more than what it estimates. Differential attention has half as many heads,
which makes its heads as expensive as the plain ones (Ye et al. 2024).

    python -m experiments.sweep --config=configs/sweeps/variants.py --workdir=runs/variants

Cost: 6 arms x 8 seeds = 48 runs, each of 3.0e11 to 4.4e11 FLOPs, and a program to compile for each arm.
"""

from mha_research.config import default_config
from mha_research.sweeps import Claim, Sweep

METRIC = "test/nats_per_char"


def get_config():
    config = default_config()
    config.task.length = 64
    config.task.segments = False  # neither a Performer nor a convolution keeps the documents of a window apart
    config.model.num_layers = 2
    config.model.d_model = 64
    config.model.attention.implementation = "reference"  # 64 keys are one tile: dense, it compiles sooner
    config.optimizer.learning_rate = 3e-3
    config.optimizer.warmup_steps = 20
    config.train.steps = 400
    config.train.batch_size = 16
    config.train.eval_every = 200
    config.train.eval_batch_size = 32
    config.train.checkpoint_every = 200
    config.run.tensorboard = False
    config.run.baselines = False
    return config


def better(arm, text, source):
    """The claim that the loss of `arm` is lower than that of plain attention."""
    return Claim(text=text, source=source, metric=METRIC, contrast={"plain": 1, arm: -1})


def as_good(arm, text, source):
    """The claim that the losses of `arm` and of plain attention differ by less than 0.02 nats."""
    contrast = {"plain": 1, arm: -1}
    return Claim(text=text, source=source, metric=METRIC, contrast=contrast, kind="within", margin=0.02)


def get_sweep():
    kind, attention = "model.attention.kind", "model.attention"
    return Sweep(
        arms={
            "plain": {},
            "talking_heads": {kind: "talking_heads"},
            "differential": {kind: "differential", f"{attention}.num_heads": 2},
            "conv_value": {kind: "conv_value"},
            "sigmoid": {kind: "sigmoid"},
            "performer": {kind: "performer", f"{attention}.num_features": 64},
        },
        seeds=8,
        claims=[
            better("talking_heads", "Heads that talk to each other beat heads that do not", "Shazeer et al. 2020"),
            better("differential", "The difference of two softmaxes beats one softmax", "Ye et al. 2024"),
            better("conv_value", "Values of a neighbourhood beat values of a token", "after Wu et al. 2021"),
            as_good("sigmoid", "Sigmoid attention is as good as softmax attention", "Ramapuram et al. 2024"),
            as_good("performer", "A Performer is as good as what it estimates", "Choromanski et al. 2021"),
        ],
        worst={METRIC: 5.0},
    )
