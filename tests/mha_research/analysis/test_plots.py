"""What is drawn is what was given."""

import numpy as np
import pytest

from mha_research.analysis.report.plots import attention_maps, loss_curve

ROWS = [
    {"step": 2, "train/loss": 3.0},
    {"step": 4, "train/loss": 2.0},
    {"step": 4, "valid/loss": 2.5},
    {"step": 4, "time/seconds": 1.0},
]


def test_the_loss_curve_has_every_point_and_every_baseline() -> None:
    axes = loss_curve(ROWS, {"bz2": 1.75, "uniform": 4.5}, "nats per character").axes[0]
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
    assert lines["train"] == ([2, 4], [3.0, 2.0])
    assert lines["valid"] == ([4], [2.5])
    assert lines["uniform 4.50"][1] == [4.5, 4.5]
    assert lines["bz2 1.75"][1] == [1.75, 1.75]
    assert axes.get_ylabel() == "loss (nats per character), lower is better"


def test_a_curve_without_losses_is_refused() -> None:
    with pytest.raises(ValueError, match="train/loss or valid/loss"):
        loss_curve([{"step": 1}], {}, "nats")


def test_each_head_has_its_panel() -> None:
    rng = np.random.default_rng(0)
    layers = [rng.dirichlet(np.ones(5), size=(heads, 5)) for heads in (3, 2)]
    figure = attention_maps(layers, list("abcde"))
    drawn = {axes.get_title(): axes.images[0].get_array() for axes in figure.axes if axes.get_title()}
    assert set(drawn) == {f"layer {layer} head {head}" for layer, heads in ((0, 3), (1, 2)) for head in range(heads)}
    np.testing.assert_allclose(drawn["layer 1 head 1"] ** 2, layers[1][1], rtol=1e-6)


def test_maps_that_do_not_fit_their_labels_are_refused() -> None:
    with pytest.raises(ValueError, match=r"layer 0 has shape \(2, 5, 5\); expected \(H, 4, 4\)"):
        attention_maps([np.ones((2, 5, 5))], list("abcd"))


def test_negative_weights_are_drawn_as_none() -> None:
    """A difference of softmaxes has them, and the root of one is not a number."""
    figure = attention_maps([np.array([[[0.25, -0.5], [-0.1, 1.0]]])], list("ab"))
    np.testing.assert_array_equal(figure.axes[0].images[0].get_array(), [[0.5, 0], [0, 1]])
