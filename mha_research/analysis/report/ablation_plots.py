"""Figures of an ablation, for the report page and for notebooks. Each function returns a matplotlib Figure.

They are narrow, so that a phone shows them without shrinking the text away, and have no background: `svg` makes the ink
of a figure the colour of the text around it, light or dark. Arms keep their colour and marker in every figure.
"""

import io
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mha_research.analysis.runs import Run, Runs
from mha_research.analysis.statistics.claims import Claim
from mha_research.analysis.statistics.comparison import compare, values
from mha_research.analysis.statistics.verdict import Verdict

# After Okabe and Ito, without black and yellow and with a lighter blue, so that all are legible on white and on black.
COLOURS = ("#2f87c8", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")
MARKERS = "osD^vP*X"
_INK = "#123456"  # stands for the colour of the text until the figure is on a page
_WIDTH = 4.0
_STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "text.parse_math": False,  # a dollar in a name is a dollar
    "svg.hashsalt": "mha_research",
    "figure.constrained_layout.use": True,
    **{name: _INK for name in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")},
    "grid.color": _INK,
}


def _figure(height: float, rows: int = 1, **how: Any) -> tuple[Figure, np.ndarray]:
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, height))
        axes = figure.subplots(rows, 1, squeeze=False, **how)[:, 0]
        figure.patch.set_alpha(0)
        for ax in axes:
            ax.patch.set_alpha(0)
    return figure, axes


def svg(figure: Figure, title: str) -> str:
    """The figure as SVG to put inside a page; `title` is what a screen reader says."""
    buffer = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    text = re.sub(r'font: ([\d.]+)px [^;"]*', r"font: \1px sans-serif", text)
    unique = f"f{zlib.crc32(title.encode())}-"  # ids of several figures on one page must differ
    text = re.sub(r'(id="|href="#|url\(#)', rf"\1{unique}", text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{_escape(title)}" ', 1)


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")


def _look(runs: Runs) -> dict[str, dict[str, Any]]:
    return {
        arm: {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
        for i, arm in enumerate(runs.arms)
    }


def _arm_axis(ax: Axes, arms: Sequence[str]) -> None:
    long = max(map(len, arms)) * len(arms) > 50
    how: Any = {"rotation": 30 if long else 0, "ha": "right" if long else "center", "parse_math": False}
    ax.set_xticks(range(len(arms)), arms, **how)


def _better(metric: str) -> str:
    """The metric with the direction that is wanted, where its name tells."""
    if "loss" in metric or "nats" in metric or "bits" in metric:
        return f"{metric}\nlower is better"
    return f"{metric}\nhigher is better" if "accuracy" in metric else metric


def plot_effect(runs: Runs, metric: str, baseline: str) -> Figure:
    """Above: every seed's value, joined across arms. Below: each arm's mean difference to the baseline, 95 % t
    interval."""
    table, effect, look = values(runs, metric), compare(runs, metric, baseline), _look(runs)
    figure, (above, below) = _figure(4.6, 2, sharex=True, height_ratios=(3, 2))
    for _, row in table.iterrows():
        above.plot(range(len(row)), row, color=_INK, alpha=0.35, linewidth=0.8, zorder=1)
    for i, arm in enumerate(table):
        above.scatter([i] * len(table), table[arm], s=18, zorder=2, **look[arm])
        above.hlines(table[arm].mean(), i - 0.25, i + 0.25, color=look[arm]["color"], linewidth=2.5, zorder=3)
    above.set_ylabel(_better(metric))
    for i, row in enumerate(effect.itertuples()):
        below.plot([i, i], [row.low, row.high], color=look[row.arm]["color"], linewidth=2)
        below.plot(i, row.difference, markersize=6, **look[row.arm])
    below.axhline(0, color=_INK, linewidth=0.8)
    below.set_ylabel(f"difference to {baseline}")
    _arm_axis(below, list(table))
    return figure


def plot_claim(verdict: Verdict, claim: Claim) -> Figure:
    """Every seed's d, their mean with its 90 % t interval, and what was claimed, shaded."""
    figure, (ax,) = _figure(1.15)
    d = np.array(verdict.values)
    low, high = verdict.interval
    finite = [x for x in (*d, low, high, 0.0, claim.margin, -claim.margin) if math.isfinite(x)]
    pad = 0.08 * (max(finite) - min(finite) or 1)
    left, right = min(finite) - pad, max(finite) + pad
    ax.axvspan(-claim.margin if claim.kind == "within" else claim.margin, claim.margin if claim.kind == "within" else
    right,
               color="#009e73", alpha=0.15, linewidth=0)  # fmt: skip
    ax.axvline(0, color=_INK, linewidth=0.8)
    ax.plot([low, high], [0, 0], color=COLOURS[0], linewidth=2.5)
    ax.plot([verdict.mean], [0], "D", color=COLOURS[0], markersize=6)
    ax.plot(d, np.full(len(d), 1.0), "o", color=_INK, alpha=0.6, markersize=4)
    ax.set(ylim=(-0.7, 1.7), xlim=(left, right), yticks=[0, 1], yticklabels=["mean", "seeds"])
    ax.set_xlabel(f"contrast of {claim.metric}" + (" (natural log)" if claim.scale == "log_ratio" else ""))
    return figure


def plot_curves(runs: Runs, metric: str) -> Figure:
    """The metric over training: mean over seeds, and the range of the seeds as a band."""
    figure, (ax,) = _figure(3.0)
    _bands(ax, runs, {run.name: run.curve(metric).rename(columns={"step": "x"}) for run in runs.main()})
    ax.set(xlabel="step", ylabel=_better(metric))
    _legend(ax, runs)
    return figure


def plot_cost(runs: Runs, metric: str) -> Figure:
    """The metric at equal steps, equal time and equal FLOPs, so that an arm that is slower or larger shows it."""
    figure, axes = _figure(6.6, 3, sharey=True)
    for ax, (label, scale) in zip(axes, {"step": _steps, "seconds": _seconds, "FLOPs": _flops}.items()):
        _bands(ax, runs, {run.name: scale(run, run.curve(metric)) for run in runs.main()})
        ax.set(xlabel=label, ylabel=_better(metric))
    _legend(axes[0], runs)
    return figure


def _steps(_: Run, curve: pd.DataFrame) -> pd.DataFrame:
    return curve.rename(columns={"step": "x"})


def _seconds(run: Run, curve: pd.DataFrame) -> pd.DataFrame:
    """From the first logged step on: before it the update is compiled, which only the first run of its shapes waits
    for."""
    clock = run.curve("time/seconds")
    if not len(clock) or not len(curve):
        return pd.DataFrame({"x": [], "value": []})
    seconds = np.interp(curve["step"], clock["step"], clock["value"]) - clock["value"].iloc[0]
    return pd.DataFrame({"x": seconds, "value": curve["value"]})


def _flops(run: Run, curve: pd.DataFrame) -> pd.DataFrame:
    flops = run.result.get("flops_per_step", math.nan)
    return pd.DataFrame({"x": curve["step"] * flops, "value": curve["value"]}).dropna()


def _bands(ax: Axes, runs: Runs, curves: Mapping[str, pd.DataFrame]) -> None:
    """One line and band per arm. Seeds of an arm are logged at the same steps; their x (time) is averaged as their y
    is."""
    look = _look(runs)
    for arm in runs.arms:
        parts = [curves[run.name].reset_index(drop=True) for run in runs.main() if run.arm == arm]
        parts = [part for part in parts if len(part)]
        if not parts:
            continue
        together = pd.concat(parts).groupby(level=0).agg({"x": "mean", "value": ["mean", "min", "max"]})
        x, y = together["x"]["mean"], together["value"]
        ax.fill_between(x, y["min"], y["max"], color=look[arm]["color"], alpha=0.18, linewidth=0)
        ax.plot(x, y["mean"], label=arm, linewidth=1.5, markersize=3, **look[arm])


def plot_heads(runs: Runs) -> Figure:
    """What heads do over training: per arm the mean over its heads, layers and seeds, and their range as a band.

    Heads of different seeds have no order in common, so none is followed by its number. Raises ValueError where nothing
    was logged (`run.head_statistics`).
    """
    rows = [
        run.rows.melt("step", var_name="metric", value_name="value").dropna().assign(arm=run.arm)
        for run in runs.main()
        if any(name.startswith("heads/") for name in run.rows)
    ]
    if not rows:
        raise ValueError("no run has logged what its heads do: set run.head_statistics")
    table = pd.concat(rows)
    table = table[table["metric"].str.startswith("heads/")]
    table["statistic"] = table["metric"].str.split("/").str[1]
    names, look = list(dict.fromkeys(table["statistic"])), _look(runs)
    figure, axes = _figure(2.0 * len(names) + 0.4, len(names), sharex=True)
    for ax, name in zip(axes, names):
        for arm in runs.arms:
            found = table[(table["statistic"] == name) & (table["arm"] == arm)].groupby("step")["value"]
            mean = found.mean()
            ax.fill_between(mean.index, found.min(), found.max(), color=look[arm]["color"], alpha=0.15, linewidth=0)
            ax.plot(mean.index, mean, label=arm, linewidth=1.5, markersize=3, **look[arm])
        ax.set_ylabel(name.replace("_", " "))
    axes[-1].set_xlabel("step")
    _legend(axes[0], runs)
    return figure


def plot_tuning(runs: Runs) -> Figure:
    """The tuned metric at each value of the grid, per arm: points are seeds, the line is their mean."""
    assert runs.manifest is not None
    assert runs.manifest.frozen.tune is not None
    tune, look = runs.manifest.frozen.tune, _look(runs)
    figure, (ax,) = _figure(3.0)
    grid = {value: i for i, value in enumerate(tune["values"])}
    for arm in runs.arms:
        tuning = [run for run in runs if run.arm == arm and run.phase == "tune" and run.config]
        points = [(grid[run.config[tune["field"]]], run.value(tune["metric"])) for run in tuning]
        if not points:
            continue
        means = pd.DataFrame(points, columns=["x", "y"]).groupby("x")["y"].mean()
        ax.plot(means.index, means, label=arm, linewidth=1.5, **look[arm])
        ax.scatter(*zip(*points), s=10, alpha=0.6, **look[arm])
    ax.set_xticks(list(grid.values()), [f"{value:g}" if isinstance(value, float) else str(value) for value in grid])
    ax.set(xlabel=tune["field"], ylabel=_better(tune["metric"]))
    _legend(ax, runs)
    return figure


def _legend(ax: Axes, runs: Runs) -> None:
    with matplotlib.rc_context(_STYLE):
        ax.figure.legend(*ax.get_legend_handles_labels(), loc="outside upper center", ncols=min(len(runs.arms), 6))
