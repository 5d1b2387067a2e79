"""A sample of text from a character model."""

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from mha_research.models import DecoderLM, sample
from mha_research.tasks import CharLM
from mha_research.tasks.char_lm import BOUNDARY, UNKNOWN


def generate(config: ConfigDict, task: CharLM, model: DecoderLM) -> str:
    """The prompt and `run.sample_length` characters after it; the same for the same parameters and seed."""
    prompt = np.concatenate([[BOUNDARY], task.vocabulary.encode(config.run.sample_prompt)])
    tokens = sample(
        model,
        jnp.asarray(prompt, jnp.int32),
        config.run.sample_length,
        jax.random.key(config.seed),
        config.run.sample_temperature,
        forbidden=(BOUNDARY, UNKNOWN),
        context=config.task.length,
    )
    return config.run.sample_prompt + task.vocabulary.decode(np.asarray(tokens))
