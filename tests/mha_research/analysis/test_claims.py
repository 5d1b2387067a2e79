"""A claim is refused, naming what is wrong, before it can be frozen; and it survives the trip through JSON."""

import json

import pytest

from mha_research.analysis.statistics.claims import AllOf, Claim, claim_from_json, claim_to_json, elementary

GOOD = {"text": "more is better", "metric": "test/accuracy", "contrast": {"a": 1, "b": -1}}


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"contrast": {"a": 1, "b": 1}}, ValueError, r"contrast .* sum to zero .* got \{'a': 1.0, 'b': 1.0\}"),
        ({"contrast": {"a": 0, "b": 0}}, ValueError, "contrast .* without being zero"),
        ({"contrast": {}}, ValueError, "contrast"),
        ({"contrast": {"a": "1", "b": -1}}, TypeError, r"contrast\['a'\] .* number; got '1' of type str"),
        ({"contrast": {"a": True, "b": -1}}, TypeError, r"contrast\['a'\]"),
        ({"contrast": ["a", "b"]}, TypeError, "contrast .* maps arm names"),
        ({"kind": "less"}, ValueError, "kind .* greater, within; got 'less'"),
        ({"scale": "log"}, ValueError, "scale .* difference, log_ratio; got 'log'"),
        ({"margin": -0.1}, ValueError, "margin .* at least zero; got -0.1"),
        ({"margin": float("nan")}, ValueError, "margin .* finite"),
        ({"kind": "within"}, ValueError, "margin .* above zero; got 0.0"),
        ({"metric": 3}, TypeError, "metric .* string; got 3 of type int"),
        ({"text": ""}, ValueError, "text is empty"),
    ],
)
def test_refused(change, error, message):
    with pytest.raises(error, match=message):
        Claim(**{**GOOD, **change})


def test_a_centred_trend_with_rounding_is_a_contrast():
    third = 1 / 3
    assert sum(Claim(**{**GOOD, "contrast": {"a": 1, "b": -third, "c": -third, "d": -third}}).contrast.values()) < 1e-9


@pytest.mark.parametrize("parts, error", [([], ValueError), ([Claim(**GOOD)], ValueError), (Claim(**GOOD), TypeError),
                                          ([Claim(**GOOD), "b"], TypeError), ("ab", TypeError)])  # fmt: skip
def test_all_of_refuses(parts, error):
    with pytest.raises(error, match=r"AllOf"):
        AllOf(parts)


def test_json_and_order():
    first = Claim(**GOOD, margin=0.5, source="Vaswani 2017, table 3")
    second = Claim(**{**GOOD, "text": "and equal"}, kind="within", margin=1, scale="log_ratio")
    both = AllOf([first, second], source="x")
    assert both.text == "more is better; and and equal"
    assert [claim_from_json(json.loads(json.dumps(claim_to_json(c)))) for c in (first, both)] == [first, both]
    assert list(elementary([second, both])) == [second, first, second]
