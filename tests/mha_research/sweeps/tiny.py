"""How many heads does induction need? A sweep of seconds."""

from mha_research.config import default_config
from mha_research.sweeps import Claim, Sweep, Tune, vary


def get_config():
    config = default_config()
    config.task.name = "induction"
    config.task.length = 11
    config.task.vocabulary_size = 7
    config.task.evaluation_size = 13
    config.model.num_layers = 1
    config.model.d_model = 12
    config.model.attention.implementation = "reference"
    config.model.attention.position.name = "none"
    config.optimizer.warmup_steps = 2
    config.train.steps = 8
    config.train.batch_size = 3
    config.train.log_every = 2
    config.train.eval_every = 4
    config.train.checkpoint_every = 2
    config.run.tensorboard = False
    return config


def get_sweep():
    return Sweep(
        arms=vary("model.attention.num_heads", [1, 3], "h{}"),
        seeds=3,
        claims=[Claim(text="Three heads beat one", metric="test/loss", contrast={"h1": 1, "h3": -1})],
        worst={"test/loss": 3.0},
    )


def tuned():
    """The same, with the learning rate tuned."""
    sweep = get_sweep()
    tune = Tune("optimizer.learning_rate", [1e-3, 3e-3], seeds=1, metric="valid/loss")
    return Sweep(sweep.arms, 3, sweep.claims, tune, sweep.worst)
