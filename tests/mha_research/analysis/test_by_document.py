"""The bootstrap over documents, against scipy's of plain differences where documents are equally long."""

import json
import math

import numpy as np
import pytest
from scipy import stats

from mha_research.analysis.runs import load_runs
from mha_research.analysis.statistics.by_document import document_interval
from mha_research.analysis.statistics.claims import Claim
from tests.mha_research.analysis.synthetic import METRIC, fail, make_sweep

DOCUMENTS = 11
CLAIM = Claim(text="Two heads beat one", metric=METRIC, contrast={"h1": 1, "h2": -1})


@pytest.fixture
def workdir(tmp_path):
    return make_sweep(tmp_path / "s", seeds=range(3))


def write(workdir, loss, count, split="test"):
    """`loss(arm, seed)` is the mean loss of each document."""
    for arm in ("h1", "h2"):
        for seed in range(3):
            sums = {"loss": list(loss(arm, seed) * count), "hits": list(0.5 * count), "count": list(count)}
            path = workdir / f"runs/{arm}/seed{seed}/documents.json"
            path.write_text(json.dumps({split: sums}))


def losses(arm, seed):
    rng = np.random.default_rng(seed)
    return 2 + rng.normal(0, 0.3, DOCUMENTS) + (arm == "h1") * np.random.default_rng(9).normal(0.1, 0.05, DOCUMENTS)


def test_equally_long_documents_are_plain_differences(workdir):
    write(workdir, losses, np.full(DOCUMENTS, 1000.0))
    low, high, documents = document_interval(load_runs(workdir), CLAIM)
    d = np.mean([losses("h1", seed) - losses("h2", seed) for seed in range(3)], axis=0)
    plain = stats.bootstrap((d,), np.mean, n_resamples=9999, rng=np.random.default_rng(1)).confidence_interval
    width = plain.high - plain.low
    assert documents == DOCUMENTS
    assert (low, high) == pytest.approx((plain.low, plain.high), abs=0.1 * width)


def test_long_documents_weigh_more(workdir):
    count = np.full(DOCUMENTS, 10.0)
    count[4] = 1e6
    write(workdir, losses, count)
    low, high, _ = document_interval(load_runs(workdir), CLAIM)
    heavy = losses("h1", 0)[4] - losses("h2", 0)[4]
    assert low <= heavy + 1e-4
    assert high >= heavy - 1e-4
    assert document_interval(load_runs(workdir), CLAIM) == (low, high, DOCUMENTS)  # the same every time


def test_bits_logarithms_and_lengths(workdir):
    def proportional(arm, seed):
        return losses("h2", seed) * (1.1 if arm == "h1" else 1.0)

    write(workdir, proportional, np.full(DOCUMENTS, 7.0), split="test@256")
    claim = Claim(text="?", metric=f"{METRIC}@256", contrast=CLAIM.contrast, scale="log_ratio")
    assert document_interval(load_runs(workdir), claim) == pytest.approx((math.log(1.1), math.log(1.1), DOCUMENTS))
    nats = document_interval(load_runs(workdir), Claim(text="?", metric=f"{METRIC}@256", contrast=CLAIM.contrast))
    claim = Claim(text="?", metric="test/bits_per_char@256", contrast=CLAIM.contrast)
    assert document_interval(load_runs(workdir), claim)[:2] == pytest.approx([x / math.log(2) for x in nats[:2]])
    claim = Claim(text="?", metric="test/accuracy@256", contrast=CLAIM.contrast)
    assert document_interval(load_runs(workdir), claim) == (0, 0, DOCUMENTS)


def test_seeds_without_a_finished_pair_are_left_out(workdir):
    write(workdir, lambda arm, seed: losses(arm, seed) + 100 * (seed == 2), np.full(DOCUMENTS, 7.0))
    fail(workdir, "h2/seed2")
    _, high, _ = document_interval(load_runs(workdir), CLAIM)
    assert high < 1


def test_none_where_there_is_nothing_to_draw(workdir):
    assert document_interval(load_runs(workdir), CLAIM) is None
    write(workdir, lambda arm, seed: np.ones(4), np.ones(4))
    assert document_interval(load_runs(workdir), CLAIM) is None
    sizes = Claim(text="?", metric="parameters", contrast=CLAIM.contrast)
    assert document_interval(load_runs(workdir), sizes) is None
