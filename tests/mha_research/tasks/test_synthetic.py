"""The generators are what they are defined to be, and solvable to zero loss by the rule that they claim."""

import math

import numpy as np
import pytest

from mha_research.tasks import copy, induction


def test_copy_repeats_the_word_after_the_separator() -> None:
    task = copy(length=10, vocabulary_size=7)
    batch = task.train_batches(0, 5)[3]
    assert batch["tokens"].shape == (5, 10)
    assert task.spec.vocabulary_size == 8
    np.testing.assert_array_equal(batch["tokens"][:, 5], 7)
    np.testing.assert_array_equal(batch["tokens"][:, :5], batch["targets"][:, 5:])
    np.testing.assert_array_equal(batch["mask"], np.broadcast_to(np.arange(10) >= 5, (5, 10)))
    assert task.chance == pytest.approx(math.log(7))


def test_induction_is_solved_by_what_followed_the_same_symbol() -> None:
    periods = set()
    for batch in (induction(20, 11).train_batches(1, 13)[step] for step in range(5)):
        for tokens, targets, mask in zip(batch["tokens"], batch["targets"], batch["mask"]):
            periods.add(int(mask.argmax()))
            for i in np.flatnonzero(mask):
                (before,) = np.flatnonzero(tokens[:i] == tokens[i])[-1:]
                assert tokens[before + 1] == targets[i]
            assert len(set(tokens[: mask.argmax()].tolist())) == mask.argmax()
    assert periods == set(range(5, 11))


def test_held_out_examples_are_fixed_and_unlike_each_other() -> None:
    task = copy(8, 5, evaluation_size=7)
    valid, test = (
        np.concatenate([b["tokens"][b["mask"].any(1)] for b in task.evaluations()[s].batches(3)])
        for s in ("valid", "test")
    )
    assert valid.shape == test.shape == (7, 8)
    assert not np.array_equal(valid, test)
    assert len(np.unique(valid, axis=0)) == 7
    again = copy(8, 5, evaluation_size=7).evaluations()["valid"].batches(7)[0]["tokens"]
    np.testing.assert_array_equal(valid, again)


def test_sizes_that_make_no_task_are_refused() -> None:
    with pytest.raises(ValueError, match=r"task\.length must be even for copy, got 7"):
        copy(7)
    with pytest.raises(ValueError, match=r"must be at least task\.length / 2, got 4"):
        induction(10, 4)
    with pytest.raises(ValueError, match="got 2, 5 and 3"):
        copy(2, 5, 3)
