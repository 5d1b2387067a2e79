"""Planning: exactly the runs that were asked for, numbers as numbers, and nothing created for a file that is wrong."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from mha_research.analysis.manifest import Manifest
from mha_research.config import default_config
from mha_research.sweeps import Claim, Sweep, Tune, product, vary
from mha_research.sweeps.plan import SweepError, extend, load_sweep, plan, run_config, shrink
from mha_research.sweeps.sizes import sizes, unmatched
from tests.mha_research.sweeps import tiny

FILE = Path(tiny.__file__)


def planned(sweep, base=None):
    return plan("?", "x.py", base or tiny.get_config(), sweep)


def test_three_rates_and_two_seeds_are_six_runs():
    rates = vary("optimizer.learning_rate", [1e-3, 1e-4, 3.0e-4], "lr{}")
    manifest = planned(Sweep(rates, [0, 1]))
    assert len(manifest.runs) == 6
    assert len({run.name for run in manifest.runs}) == 6
    configs = [run_config(manifest, run) for run in manifest.runs]
    assert [config.optimizer.learning_rate for config in configs] == [0.001, 0.0001, 0.0003] * 2
    assert [config.seed for config in configs] == [0, 0, 0, 1, 1, 1]
    assert all(type(config.optimizer.learning_rate) is float and type(config.seed) is int for config in configs)
    assert planned(Sweep(rates, [0, 1])).to_text() == manifest.to_text()


@pytest.mark.parametrize(
    "arms, message",
    [
        ({"a": {"optimizer.learning_rate": "1e-4"}}, "arm 'a': optimizer.learning_rate must be float, got '1e-4'"),
        ({"a": {"optimizer.learning_rat": 1e-4}}, "arm 'a': there is no field 'optimizer.learning_rat'"),
        ({"a": {"train.steps": 3.5}}, "train.steps must be int, got 3.5"),
        ({"a": {"train.steps": 0}}, "train.steps must be 1 or more"),
        ({"a": {"model.norm": "batch"}}, "model.norm must be 'rms_norm' or 'layer_norm'"),
        ({"a": {"model.attention.position.base": 5.0}}, "position.base belongs to"),
        ({"a": {}, "b": {"train.steps": 8}}, "the arms 'a' and 'b' have the same config"),
        ({"a": {}, "b": {"run.tensorboard": True}}, "the arms 'a' and 'b' have the same config"),
    ],
)
def test_what_is_wrong_in_an_arm_is_named(arms, message):
    with pytest.raises(SweepError, match=message):
        planned(Sweep(arms, 3))


def test_the_tuning_grid_is_typed_and_comes_first():
    with pytest.raises(SweepError, match=r"Tune.values: optimizer.learning_rate must be float, got '1e-3'"):
        planned(Sweep({"a": {}}, 3, tune=Tune("optimizer.learning_rate", ["1e-3", "1e-4"], 1, "valid/loss")))
    manifest = planned(tiny.tuned())
    assert [run.name for run in manifest.runs[:3]] == ["h1/tune0-seed1000", "h3/tune0-seed1000", "h1/tune1-seed1000"]
    assert len(manifest.runs) == 4 + 6
    assert run_config(manifest, manifest.runs[2]).optimizer.learning_rate == 0.003
    assert run_config(manifest, manifest.runs[4], {"optimizer.learning_rate": 0.002}).optimizer.learning_rate == 0.002


def test_optional_fields_take_numbers_and_none():
    arms = {"a": {"optimizer.clip_norm": 0}, "b": {"optimizer.clip_norm": 0.1}, "c": {"optimizer.clip_norm": None}}
    manifest = planned(Sweep(arms, 1))
    found = [run_config(manifest, run).optimizer.clip_norm for run in manifest.runs]
    assert found == [0.0, 0.1, None]
    assert type(found[0]) is float


def test_files(tmp_path):
    title, base, sweep = load_sweep(FILE, {"train.steps": "5"})
    assert title == "How many heads does induction need? A sweep of seconds."
    assert base.train.steps == 5
    assert list(sweep.arms) == ["h1", "h3"]
    for text, message in (
        ("", r"has no function get_config\(\)"),
        ("def get_config(): pass\ndef get_sweep(): return 3", "returns a Sweep; got int"),
        ("def get_config(): pass\ndef get_sweep(): raise ValueError('no arms')", "no arms"),
        ("def get_config(): pass\ndef get_sweep(): return {}['h1']", "s.py, line 2: KeyError: 'h1'"),
        ("def get_config(): x.y = 3", "s.py, line 1: NameError"),
        ("def get_config(): exit(3)", "s.py, line 1: SystemExit: 3"),
    ):
        path = tmp_path / "s.py"
        path.write_text(text)
        with pytest.raises(SweepError, match=message):
            load_sweep(path)


def test_later_changes_are_exploratory_or_refused():
    started = planned(tiny.get_sweep())
    sweep = tiny.get_sweep()
    more = dataclasses.replace(sweep, seeds=4, arms={**sweep.arms, "h2": {"model.attention.num_heads": 2}})
    added = extend(started, planned(more))
    assert added.frozen.hash == started.frozen.hash
    assert list(added.later.seeds) == [0, 1, 2, 3]
    assert [run.name for run in added.runs if run.exploratory] == ["h2/seed0", "h2/seed1", "h2/seed2", *(
        f"{arm}/seed3" for arm in ("h1", "h3", "h2"))]  # fmt: skip
    assert added.runs[:6] == started.runs
    claims = [Claim(text="Another", metric="test/loss", contrast={"h1": -1, "h3": 1})]
    changed = extend(started, planned(dataclasses.replace(sweep, claims=claims)))
    assert changed.later.claims[0].text == "Another"
    assert changed.frozen == started.frozen
    same = extend(started, planned(sweep))
    assert same.later is None
    assert same.to_text() == started.to_text()
    base = tiny.get_config()
    base.train.steps = 9
    with pytest.raises(SweepError, match=r"train.steps 8, now 9"):
        extend(started, planned(sweep, base))
    with pytest.raises(SweepError, match="another arm 'h1'"):
        extend(started, planned(dataclasses.replace(sweep, arms={"h1": {"model.d_model": 24}}, claims=())))
    with pytest.raises(SweepError, match="another tuning grid"):
        extend(started, planned(tiny.tuned()))


def test_hash_is_of_claims_seeds_and_grid():
    sweep = tiny.tuned()
    known = planned(sweep).frozen.hash
    assert planned(tiny.tuned()).frozen.hash == known
    claim = dataclasses.replace(sweep.claims[0], margin=0.1)
    tune = dataclasses.replace(sweep.tune, values=[1e-3, 2e-3])
    for change in ({"seeds": 4}, {"claims": [claim]}, {"tune": tune}, {"worst": {}}):
        assert planned(dataclasses.replace(sweep, **change)).frozen.hash != known
    assert planned(dataclasses.replace(sweep, arms={"h3": {}, **sweep.arms})).frozen.hash == known


def test_the_manifest_is_plain_json(tmp_path):
    arms = product(vary("task.test_lengths", [(16, 32), (64,)]), vary("train.batch_size", [2, 4]))
    base = default_config()
    manifest = planned(Sweep(arms, 2), base)
    (tmp_path / "manifest.json").write_text(manifest.to_text())
    data = json.loads(manifest.to_text())
    assert data["runs"][0]["overrides"] == {"task.test_lengths": [16, 32], "train.batch_size": 2, "seed": 0}
    again = Manifest.read(tmp_path)
    assert run_config(again, again.runs[0]).task.test_lengths == (16, 32)


def test_sizes_by_hand_and_what_is_not_matched():
    wide = Sweep({"d12": {}, "d24": {"model.d_model": 24}}, 1)
    found = sizes(planned(wide))

    def parameters(d):  # tied embeddings, four d x d projections, an MLP of 4 d, three norms
        return 7 * d + 4 * d * d + 8 * d * d + 3 * d

    assert {arm: size.parameters for arm, size in found.items()} == {"d12": parameters(12), "d24": parameters(24)}
    assert found["d12"].tokens_per_step == 33
    assert found["d12"].steps == 8
    lines = unmatched(found)
    assert lines[0].startswith("parameters differ by ")
    assert "flops" in lines[1]
    assert len(lines) == 2
    assert unmatched(sizes(planned(tiny.get_sweep()))) == []


def test_a_model_that_cannot_be_built_is_refused_in_planning():
    with pytest.raises(ValueError, match=r"arm 'h5': model: .*heads"):
        sizes(planned(Sweep({"h5": {"model.attention.num_heads": 5}}, 1)))


@pytest.mark.parametrize(
    "metric,told",
    [
        ("test/los", "arm 'h1' reports no 'test/los', which a claim asks for; did you mean 'test/loss'?"),
        ("steps_to:valid/lost<=2.0", "no 'valid/lost', which a claim asks for; did you mean 'valid/loss'?"),
        ("test/quality", "there are valid/loss, valid/accuracy, test/loss, test/accuracy"),
    ],
)
def test_a_metric_that_no_run_will_have_is_refused_in_planning(metric, told):
    wrong = dataclasses.replace(
        tiny.get_sweep(), claims=[Claim(text="it is", metric=metric, contrast={"h1": 1, "h3": -1})], worst={}
    )
    with pytest.raises(SweepError, match=re.escape(told)):
        sizes(planned(wrong))
    for asked in ("steps_to:valid/loss<=2.0", "time/steps_per_second", "parameters"):
        claim = Claim(text="it is", metric=asked, contrast={"h1": 1, "h3": -1})
        sizes(planned(dataclasses.replace(tiny.get_sweep(), claims=[claim], worst={})))
    with pytest.raises(SweepError, match=r"no 'test/nll', which a Sweep\.worst asks for"):
        sizes(planned(dataclasses.replace(tiny.get_sweep(), claims=[], worst={"test/nll": 3.0})))


def test_quick_is_small():
    base, sweep = shrink(default_config(), tiny.tuned())
    assert base.train.steps == 4
    assert base.train.batch_size == 4
    assert base.train.eval_limit == 32
    assert list(sweep.seeds) == [0, 1]
    assert sweep.tune is None


def test_every_value_of_the_grid_is_checked_with_every_arm():
    arms = {"a": {}, "b": {"train.accumulate": 3}}
    with pytest.raises(SweepError, match=r"arm 'b': train\.batch_size 4 must be a multiple of train\.accumulate 3"):
        planned(Sweep(arms, 3, tune=Tune("train.batch_size", [3, 4], 1, "valid/loss")))
    with pytest.raises(SweepError, match=r"arm 'a': train\.batch_size must be 1 or more, got -1"):
        planned(Sweep(arms, 3, tune=Tune("train.batch_size", [3, -1], 1, "valid/loss")))
    with pytest.raises(SweepError, match=r"Tune\.field is seed"):
        planned(Sweep(arms, 3, tune=Tune("seed", [3, 4], [1000], "valid/loss")))
