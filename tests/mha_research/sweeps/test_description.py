"""A sweep is refused for what is wrong in it, by name; the helpers make the arms that one would write by hand."""

import pytest

from mha_research.sweeps import AllOf, Claim, Sweep, Tune, chain, product, vary, zipped

ARMS = {"a": {"model.d_model": 32}, "b": {"model.d_model": 64}}
CLAIM = Claim(text="b beats a", metric="test/loss", contrast={"a": 1, "b": -1})


def test_helpers():
    heads = vary("model.attention.num_heads", [1, 8], "h{}")
    rates = vary("optimizer.learning_rate", [1e-3, 1e-4, 3.0e-4])
    assert heads == {"h1": {"model.attention.num_heads": 1}, "h8": {"model.attention.num_heads": 8}}
    assert list(rates) == ["learning_rate=0.001", "learning_rate=0.0001", "learning_rate=0.0003"]
    both = product(heads, rates)
    assert list(both)[:2] == ["h1-learning_rate=0.001", "h1-learning_rate=0.0001"]
    assert len(both) == 6
    assert both["h8-learning_rate=0.0003"] == {"model.attention.num_heads": 8, "optimizer.learning_rate": 0.0003}
    widths = vary("model.d_model", [8, 16], "d{}")
    assert list(zipped(heads, widths)) == ["h1-d8", "h8-d16"]
    assert list(chain(heads, widths)) == ["h1", "h8", "d8", "d16"]
    assert list(vary("task.test_lengths", [(64, 128)])) == ["test_lengths=64_128"]


def test_helpers_refuse():
    heads = vary("model.attention.num_heads", [1, 8], "h{}")
    with pytest.raises(ValueError, match="two arms 'h1'"):
        chain(heads, heads)
    with pytest.raises(ValueError, match=r"both set 'model.attention.num_heads'"):
        product(heads, vary("model.attention.num_heads", [2]))
    with pytest.raises(ValueError, match=r"equally long; got \[2, 1\]"):
        zipped(heads, vary("model.d_model", [8]))
    with pytest.raises(ValueError, match="two arms 'x'"):
        vary("model.d_model", [8, 16], "x")


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"arms": {}}, ValueError, "arms is empty"),
        ({"arms": {"a/b": {}}}, ValueError, "name of an arm .* got 'a/b'"),
        ({"arms": {"../x": {}}}, ValueError, "name of an arm"),
        ({"arms": [("a", {}), ("a", {"model.d_model": 8})]}, ValueError, "two arms 'a'"),
        ({"arms": {"a": {"seed": 3}}}, ValueError, "'a' sets seed"),
        ({"arms": {"a": 3}}, TypeError, "'a' maps paths"),
        ({"seeds": 0}, ValueError, "seeds is empty"),
        ({"seeds": [0, 0]}, ValueError, "seed twice"),
        ({"seeds": ["0"]}, TypeError, "whole numbers; got '0' of type str"),
        ({"seeds": 2.0}, TypeError, "number of seeds or a list"),
        ({"seeds": [-1]}, ValueError, "from 0"),
        ({"claims": CLAIM}, TypeError, "list of Claims"),
        ({"claims": ["b beats a"]}, TypeError, "holds Claim and AllOf"),
        ({"claims": [Claim(text="?", metric="test/loss", contrast={"a": 1, "c": -1})]}, ValueError, "the arm 'c'"),
        ({"claims": [Claim(text="?", metric="valid/loss", contrast={"a": 1, "b": -1})]}, ValueError, "use test/"),
        ({"tune": {"field": "x"}}, TypeError, "tune is a Tune"),
        (
            {"tune": Tune("model.d_model", [8, 16], 1, "valid/loss")},
            ValueError,
            "'a' sets model.d_model, which is tuned",
        ),
        ({"tune": Tune("seed", [8, 16], [0], "valid/loss")}, ValueError, r"both lists hold \[0\]"),
        ({"worst": {"test/loss": "5"}}, TypeError, r"worst\['test/loss'\]"),
        ({"worst": {"test/loss": float("nan")}}, ValueError, r"worst\['test/loss'\] is finite.*got nan"),
        ({"worst": {"test/loss": float("inf")}}, ValueError, r"worst\['test/loss'\] is finite.*got inf"),
        ({"worst": {3: 1.0}}, TypeError, r"worst\[3\]"),
        ({"worst": [5.0]}, TypeError, "worst maps metrics"),
        ({"deterministic": "parameters"}, TypeError, "list of metrics"),
        ({"deterministic": ["parameters", 3]}, TypeError, "list of metrics"),
        ({"deterministic": 3}, TypeError, "list of metrics"),
        ({"arms": {"a" * 201: {}}}, ValueError, "name of an arm"),
    ],
)
def test_refused(change, error, message):
    with pytest.raises(error, match=message):
        Sweep(**({"arms": ARMS, "seeds": 3, "claims": [CLAIM]} | change))


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (("x", [1], 1, "valid/loss"), ValueError, "two different values"),
        (("x", [1, 1], 1, "valid/loss"), ValueError, "two different values"),
        (("x", "12", 1, "valid/loss"), TypeError, "values is a list"),
        (("x", [1, 2], 1, "test/loss"), ValueError, "starts with valid/"),
        (("x", [1, 2], 1, "valid/loss", "less"), ValueError, "min or max"),
        ((3, [1, 2], 1, "valid/loss"), TypeError, "path of a config field"),
    ],
)
def test_tune_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        Tune(*arguments)


def test_seeds_of_tuning_are_their_own():
    assert Tune("x", [1, 2], 2, "valid/loss").seeds == (1000, 1001)
    assert Sweep(ARMS, 3).seeds == (0, 1, 2)


@pytest.mark.parametrize("metric", ["test/loss@512", "time/steps_per_second", "steps_to:valid/loss<=2.5", "parameters"])
def test_what_claims_may_be_about(metric):
    claim = Claim(text="?", metric=metric, contrast={"a": 1, "b": -1})
    assert Sweep(ARMS, 3, [AllOf([claim, claim])]).claims[0].parts[0].metric == metric


@pytest.mark.parametrize("threshold", ["e", "1-2", "", "nan", "inf", "two"])
def test_a_threshold_is_a_number(threshold):
    claim = Claim(text="?", metric=f"steps_to:valid/loss<={threshold}", contrast={"a": 1, "b": -1})
    with pytest.raises(ValueError, match="claims use test/"):
        Sweep(ARMS, 3, [claim])
