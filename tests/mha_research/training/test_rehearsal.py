"""What can only be seen by running is seen before anything is written; and sums of a long text stay exact."""

import dataclasses
import pathlib
from typing import Any

import numpy as np
import pytest
from ml_collections import ConfigDict

from mha_research.config import ConfigError, override
from mha_research.factory.build import build_task
from mha_research.tasks import Evaluation
from mha_research.training import dry_run, train
from mha_research.training.evaluate import evaluate

TEXT = {"task.name": "char_lm", "task.vocabulary_size": None, "task.evaluation_size": None, "task.length": 8}
LEARNED = {"model.position.name": "learned", "model.attention.position.name": "none"}


@pytest.fixture
def text(tiny: ConfigDict, tmp_path: pathlib.Path) -> ConfigDict:
    (tmp_path / "text.txt").write_text("to be or not to be " * 9)
    return override(tiny, TEXT | {"task.files": str(tmp_path / "*.txt")})


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"model.attention.head_dim": 5}, "^model: rotate: the head width must be even, got 5"),
        ({"model.attention.implementation": "pallas_gpu"}, "^model: .*pallas_gpu"),
        ({"model.attention.implementation": "nothing"}, "^model: .*nothing"),
        ({**LEARNED, "task.test_lengths": (4, 16)}, r"^task\.test_lengths reaches position 16, beyond the 8"),
    ],
)
def test_what_would_fail_later_is_refused_now(
    changes: dict[str, Any], message: str, text: ConfigDict, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        train(override(text, changes), tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_what_fits_a_table_of_positions_is_no_fault(text: ConfigDict) -> None:
    config = override(text, LEARNED | {"task.test_lengths": (4, 8), "run.sample_length": 7, "train.batch_size": 2})
    dry_run(config, build_task(config))


@dataclasses.dataclass
class Adding:
    """Stands for a program whose every batch adds these sums in float32."""

    values: list[float]

    def evaluate(self, _: Any, sums: dict[str, Any], batch: dict[str, Any]) -> dict[str, Any]:
        value = np.float32(self.values[int(batch["index"][0])])
        return {name: (sums[name] + value).astype(np.float32) for name in sums}


def test_batches_are_summed_beyond_what_float32_counts() -> None:
    """2^24 + 1 + 1 is 2^24 in float32, and a text of some megabytes has as many characters."""
    values = [2.0**24, 1.0, 1.0, 1.0]
    held_out = Evaluation(4, lambda index: {"index": np.int32(index), "mask": np.ones(1, bool)})
    sums = evaluate(Adding(values), {}, held_out, 1)  # type: ignore[arg-type]
    assert {name: value.tolist() for name, value in sums.items()} == {
        name: [2.0**24 + 3] for name in ("loss", "hits", "count")
    }
