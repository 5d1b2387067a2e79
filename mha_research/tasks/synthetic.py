"""Exactly defined generators whose ceiling is zero loss: copy by position, and induction by content."""

import math
from collections.abc import Callable, Mapping
from functools import partial

import grain
import numpy as np

from mha_research.tasks.task import Evaluation, Example, Task, TaskSpec, random_batches


def copy_example(length: int, vocabulary_size: int, _: int, rng: np.random.Generator) -> Example:
    """`x1 ... xn S x1 ... xn` with uniform x, n = length / 2; what counts are the n targets after the separator S."""
    half = length // 2
    word = rng.integers(vocabulary_size, size=half)
    sequence = np.concatenate([word, [vocabulary_size], word])
    return _example(sequence, counted_from=half)


def induction_example(length: int, vocabulary_size: int, _: int, rng: np.random.Generator) -> Example:
    """A word of different symbols and random length in [L/4, L/2], repeated over L + 1 tokens.

    What counts are the targets that follow the first repeated symbol: each is what came after the same symbol before.
    The word's length varies, so no fixed offset solves it.
    """
    period = int(rng.integers(length // 4, length // 2 + 1))
    word = rng.permutation(vocabulary_size)[:period]
    return _example(np.resize(word, length + 1), counted_from=period)


def _example(sequence: np.ndarray, counted_from: int) -> Example:
    """Next-token example of L + 1 tokens; target i is token i + 1 and counts from i = counted_from on."""
    sequence = sequence.astype(np.int32)
    mask = np.arange(len(sequence) - 1) >= counted_from
    return {"tokens": sequence[:-1], "targets": sequence[1:], "mask": mask}


class Drawn(Task):
    """A task whose examples are drawn: training from the run's seed, held-out sets from fixed ones of their own."""

    def __init__(self, draw: Callable[..., Example], evaluation_size: int) -> None:
        self._draw, self._evaluation_size = draw, evaluation_size

    def train_batches(self, seed: int, batch_size: int) -> grain.MapDataset:
        """Fresh examples for ever."""
        return random_batches(self._draw, seed, batch_size)

    def evaluations(self) -> Mapping[str, Evaluation]:
        """The same held-out examples for every seed of training."""
        return {
            split: Evaluation(self._evaluation_size, partial(_fixed_example, self._draw, stream))
            for stream, split in enumerate(("valid", "test"))
        }


class Generated(Drawn):
    """Sequences of symbols, of which the model predicts the next."""

    def __init__(
        self, draw: Callable[..., Example], length: int, symbols: int, vocabulary_size: int, evaluation_size: int
    ) -> None:
        if length < 4 or evaluation_size < 1 or symbols < 2:
            raise ValueError(
                "task.length must be 4 or more, task.vocabulary_size 2 or more and task.evaluation_size 1 or more, "
                f"got {length}, {symbols} and {evaluation_size}"
            )
        super().__init__(partial(draw, length, symbols), evaluation_size)
        self.spec = TaskSpec("decoder", vocabulary_size, length)
        self.chance = math.log(symbols)
        drawn = f"generated examples of {length} tokens and {symbols} symbols, {evaluation_size} held out"
        self.notes = (drawn,)

    def baselines(self) -> Mapping[str, Mapping[str, float]]:
        """A uniform guess."""
        return {split: {"uniform": self.chance} for split in ("valid", "test")}


def _fixed_example(draw: Callable[..., Example], stream: int, index: int) -> Example:
    """The held-out example of an index: `stream` tells the sets apart."""
    return draw(index, np.random.Generator(np.random.Philox(key=np.array([stream, index], np.uint64))))


def copy(length: int = 32, vocabulary_size: int = 16, evaluation_size: int = 256) -> Generated:
    """Repeat a random word after a separator: solved by attending a fixed distance back. Its length L must be even.

    Args:
        length: tokens of one example
        vocabulary_size: number of different symbols that are generated
        evaluation_size: number of held-out examples in each of valid and test
    """
    if length % 2:
        raise ValueError(f"task.length must be even for copy, got {length}")
    return Generated(copy_example, length, vocabulary_size, vocabulary_size + 1, evaluation_size)


def induction(length: int = 32, vocabulary_size: int = 16, evaluation_size: int = 256) -> Generated:
    """Go on with a word that repeats: solved by an induction head (Olsson et al. 2022, arXiv:2209.11895).

    Args:
        length: tokens of one example
        vocabulary_size: number of different symbols that are generated
        evaluation_size: number of held-out examples in each of valid and test
    """
    if vocabulary_size < length // 2:
        raise ValueError(
            f"task.vocabulary_size must be at least task.length / 2, got {vocabulary_size} for length {length}"
        )
    return Generated(induction_example, length, vocabulary_size, vocabulary_size, evaluation_size)
