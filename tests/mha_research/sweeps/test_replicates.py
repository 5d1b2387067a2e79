"""Runs inside one program give what they give alone, and may diverge, fail or resume apart from each other."""

import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from mha_research.config import override
from mha_research.run_dir.files import read_rows
from mha_research.sweeps.replicates import Meeting, train_together
from mha_research.training import train
from tests.mha_research.sweeps import tiny

# Separate and mapped runs differ by the order of float32 sums; eight steps of AdamW multiply that a little.
BOUND = 2e-5


def config(seed, **changes):
    return override(tiny.get_config(), {"seed": seed, **changes})


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return folder, [train(config(seed), folder / str(seed)) for seed in (0, 1)]


def close(a, b):
    assert a.keys() == b.keys()
    np.testing.assert_allclose(list(a.values()), [b[name] for name in a], rtol=BOUND, atol=BOUND)


def test_together_is_alone(alone, tmp_path):
    folder, expected = alone
    together = train_together([config(seed) for seed in (0, 1)], [tmp_path / str(seed) for seed in (0, 1)])
    for seed, (one, other) in enumerate(zip(expected, together)):
        assert other.status == "finished"
        close(one.metrics, other.metrics)
        rows = [read_rows(path / str(seed) / "metrics.jsonl") for path in (folder, tmp_path)]
        assert [row["step"] for row in rows[0]] == [row["step"] for row in rows[1]]
    assert expected[0].metrics != expected[1].metrics
    assert train_together([config(0)], [tmp_path / "0"]) == [together[0]]  # over is over


def test_one_that_was_ahead_resumes_from_its_own_step(alone, tmp_path):
    folder, expected = alone
    for seed in (0, 1):
        shutil.copytree(folder / str(seed), tmp_path / str(seed))
        (tmp_path / str(seed) / "result.json").unlink()
    shutil.rmtree(tmp_path / "0/checkpoints/8")
    shutil.rmtree(tmp_path / "1/checkpoints")
    together = train_together([config(0), config(1)], [tmp_path / "0", tmp_path / "1"])
    for one, other in zip(expected, together):
        close(one.metrics, other.metrics)


def test_one_that_fails_does_not_stop_the_others(alone, tmp_path):
    (tmp_path / "1").mkdir()
    (tmp_path / "1/foreign").touch()
    ends = train_together([config(0), config(1)], [tmp_path / "0", tmp_path / "1"])
    close(alone[1][0].metrics, ends[0].metrics)
    assert "is not empty" in str(ends[1])


def test_only_the_seed_may_differ(tmp_path):
    with pytest.raises(ValueError, match=r"differ in seed alone; got train.steps too"):
        train_together([config(0), config(1, **{"train.steps": 9})], [tmp_path / "0", tmp_path / "1"])
    assert not list(tmp_path.iterdir())


def test_a_stopped_meeting_raises_in_every_call():
    meeting = Meeting(2)
    meeting.stop(KeyboardInterrupt("enough"))
    with pytest.raises(KeyboardInterrupt, match="enough"):
        meeting._call("update", jnp.zeros(2))
