"""Figures of one run: each function takes plain numbers and returns a matplotlib figure, neither shown nor saved."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

_LINE_STYLES = ("--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))


def loss_curve(rows: Sequence[Mapping[str, Any]], baselines: Mapping[str, float], unit: str) -> Figure:
    """Training and validation loss by step, and a level line for each baseline.

    `rows` are those of metrics.jsonl: `step` with `train/loss`, `valid/loss` or neither. `baselines` maps a name to a
    loss in the same unit. Raises ValueError when no row has a loss.
    """
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel=f"loss ({unit}), lower is better")
    styles: dict[str, dict[str, Any]] = {"train": {"alpha": 0.8, "marker": "."}, "valid": {"marker": "o"}}
    for name, look in styles.items():
        points = [(row["step"], row[f"{name}/loss"]) for row in rows if f"{name}/loss" in row]
        if points:
            axes.plot(*zip(*points), label=name, **look)
    if not axes.lines:
        raise ValueError("loss_curve needs rows with train/loss or valid/loss, got none")
    for (name, loss), style in zip(sorted(baselines.items(), key=lambda item: -item[1]), _LINE_STYLES):
        axes.axhline(loss, color="black", linewidth=0.8, linestyle=style, label=f"{name} {loss:.2f}")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    return figure


def attention_maps(weights: Sequence[np.ndarray], labels: Sequence[str]) -> Figure:
    """One panel a head: queries down, keys across, darker is more probability; each row of panels is a layer.

    `weights` has one (H, L, L) array a layer and `labels` the L tokens; weights below 0, which some kinds of attention
    have, are drawn as 0. Raises ValueError when these do not fit.
    """
    heads, length = max(layer.shape[0] for layer in weights), len(labels)
    for number, layer in enumerate(weights):
        if layer.shape[1:] != (length, length):
            raise ValueError(f"layer {number} has shape {layer.shape}; expected (H, {length}, {length}) for the labels")
    figure = Figure(figsize=(3.4 * heads, 3.5 * len(weights)), layout="constrained")
    panels = figure.subplots(len(weights), heads, squeeze=False)
    for number, (layer, row) in enumerate(zip(weights, panels)):
        for head, axes in enumerate(row):
            if head >= len(layer):
                axes.set_axis_off()
                continue
            # The root makes small probabilities visible; rows sum to 1, so a head that looks everywhere is pale.
            image = axes.imshow(
                np.sqrt(np.maximum(np.asarray(layer[head], np.float32), 0)), cmap="Blues", vmin=0, vmax=1
            )
            axes.set_title(f"layer {number} head {head}", fontsize="small")
            axes.set_xticks(range(length), labels, fontsize=6, family="monospace")
            axes.set_yticks(range(length), labels, fontsize=4.5, family="monospace")
            axes.tick_params(length=0, pad=1)
    figure.supxlabel("key: the token that is read", fontsize="medium")
    figure.supylabel("query: the token that reads", fontsize="medium")
    bar = figure.colorbar(image, ax=panels, shrink=0.6, ticks=np.sqrt([0, 0.05, 0.25, 0.5, 1]))
    bar.set_ticklabels(["0", "0.05", "0.25", "0.5", "1"])
    bar.set_label("attention probability")
    return figure
