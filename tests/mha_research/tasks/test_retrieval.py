"""k-slot retrieval is what it is defined to be."""

import numpy as np
import pytest

from mha_research.tasks import Retrieval


def test_targets_are_the_values_asked_for_in_order() -> None:
    task = Retrieval(slots=3, items=7, width=5, evaluation_size=11)
    batch = task.train_batches(2, 13)[4]
    assert batch["values"].shape == (13, 7, 5)
    assert batch["targets"].shape == (13, 1, 15)
    for ids, values, asked, targets in zip(batch["ids"], batch["values"], batch["queries"], batch["targets"]):
        assert sorted(ids) == list(range(7))
        assert len(set(asked.tolist())) == 3
        for slot, one in enumerate(asked):
            (at,) = np.flatnonzero(ids == one)
            np.testing.assert_array_equal(targets[0, 5 * slot : 5 * slot + 5], values[at])
    assert batch["mask"].all()
    assert len(set(map(tuple, batch["queries"]))) > 5


def test_held_out_sets_are_fixed_and_a_guess_of_zero_has_loss_one() -> None:
    sets = [Retrieval(evaluation_size=2000).evaluations() for _ in range(2)]
    valid, test = (sets[0][name].batches(2000)[0] for name in ("valid", "test"))
    np.testing.assert_array_equal(valid["values"], sets[1]["valid"].batches(2000)[0]["values"])
    assert not np.array_equal(valid["values"], test["values"])
    # 64000 squares of normal numbers: the standard error of their mean is sqrt(2 / 64000) = 0.0056.
    assert np.mean(np.square(test["targets"])) == pytest.approx(Retrieval.chance, abs=0.02)
    assert Retrieval().metrics(0.3, 0.7) == {"loss": 0.3, "nmse": 0.3, "solved": 0.7}


def test_sizes_that_make_no_task_are_refused() -> None:
    with pytest.raises(ValueError, match=r"at least task\.slots, got 4, 8, 256 and 3"):
        Retrieval(items=3)
    with pytest.raises(ValueError, match="got 0, 8, 256 and 16"):
        Retrieval(slots=0)
