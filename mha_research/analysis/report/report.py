"""The report of an ablation: tidy tables and one self-contained page, from run directories alone.

results.csv, results.parquet    one row a run: arm, seed, status, size, final metrics
curves.csv, curves.parquet      every logged number: arm, seed, step, metric, value
compare.csv                     each metric of a claim: every arm against the baseline
verdicts.json                   each claim with its numbers and its verdict
index.html                      all of it for a person
"""

import dataclasses
import json
import math
import shlex
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from mha_research.analysis.manifest import Manifest
from mha_research.analysis.report import ablation_plots as plots
from mha_research.analysis.report import page
from mha_research.analysis.report.page import number
from mha_research.analysis.report.wording import beside, contrast_of, finding, power_of, standing
from mha_research.analysis.runs import SIZES, Runs
from mha_research.analysis.statistics.claims import AllOf, Claim, claim_to_json, elementary
from mha_research.analysis.statistics.comparison import compare, values, verdicts
from mha_research.analysis.statistics.verdict import Verdict

_EXPLORATORY = (
    "Claims or seeds that were added after the sweep had started, or that come from a directory with another question. "
    "They suggest; they do not confirm."
)
_FILES = (
    "index.html",
    "compare.csv",
    *(f"{name}.{kind}" for name in ("results", "curves") for kind in ("csv", "parquet")),
)
_OTHER = " Not all of them froze the same claims, seeds and tuning: read everything as exploratory."


def write_report(runs: Runs, folder: Path) -> Path:
    """Writes everything into `folder` and returns the page's path.

    Raises ValueError for runs that belong to no sweep, and for a folder with files of these names that no report wrote.
    """
    planned, exploratory = verdicts(runs)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "verdicts.json").exists() and (taken := [name for name in _FILES if (folder / name).exists()]):
        raise ValueError(f"{folder} holds {taken[0]} but no report; choose another folder with --output")
    judged = {"planned": [_plain(v) for v in planned], "exploratory": [_plain(v) for v in exploratory]}
    (folder / "verdicts.json").write_text(json.dumps(judged, indent=2) + "\n", encoding="utf8")
    for name, data in (("results", runs.table()), ("curves", runs.curves())):
        data.to_csv(folder / f"{name}.csv", index=False)
        data.to_parquet(folder / f"{name}.parquet", index=False)
    metrics = metrics_of(runs)
    tables = [compare(runs, metric, runs.arms[0]).assign(metric=metric) for metric in metrics if _has(runs, metric)]
    if tables:
        pd.concat(tables).to_csv(folder / "compare.csv", index=False)
    path = folder / "index.html"
    path.write_text(report_page(runs, planned, exploratory), encoding="utf8")
    return path


def metrics_of(runs: Runs) -> list[str]:
    """The metrics of the claims, or where there are none the test metrics that were measured."""
    assert runs.manifest is not None
    claimed = list(dict.fromkeys(claim.metric for claim in elementary(runs.manifest.frozen.claims)))
    measured = [name for run in runs for name in run.result.get("metrics", {}) if name.startswith("test/")]
    return claimed or list(dict.fromkeys(measured))[:1]


def report_page(runs: Runs, planned: list[Verdict], exploratory: list[Verdict]) -> str:
    """The page as text."""
    manifest = runs.manifest
    assert manifest is not None
    sections = [_head(runs, manifest, planned), "<h2>Claims</h2>", *(_claim(v, runs, manifest) for v in planned)]
    if not planned:
        sections.append("<p>This sweep claims nothing.</p>")
    if exploratory:
        sections += ["<h2>Exploratory</h2>", f"<p>{_EXPLORATORY}</p>"]
        sections += [_claim(verdict, runs, manifest) for verdict in exploratory]
    for metric in metrics_of(runs):
        if _has(runs, metric):
            sections += [f"<h2>{escape(metric)}</h2>", _compared(runs, metric)]
            sections += [] if metric in SIZES else [_figures(runs, metric)]
    if any(name.startswith("heads/") for run in runs.main() for name in run.rows):
        caption = "Mean over heads, layers and seeds of an arm, and their range. Entropy in nats, distance in tokens."
        drawn = page.figure(plots.svg(plots.plot_heads(runs), "heads"), caption)
        sections += ["<h2>What heads do while they train</h2>", drawn]
    if manifest.frozen.tune:
        sections += ["<h2>Tuning</h2>", _tuning(runs, manifest)]
    sections += ["<h2>What differs between the arms</h2>", _differences(runs, manifest)]
    sections += ["<h2>Runs</h2>", _troubles(runs), _every_number(runs)]
    sections += ["<h2>Provenance</h2>", _provenance(runs), "<h2>How to reproduce</h2>", _reproduce(runs, manifest)]
    return page.page(manifest.title, sections)


def _has(runs: Runs, metric: str) -> bool:
    return any(not math.isnan(run.value(metric)) for run in runs.main())


def _head(runs: Runs, manifest: Manifest, planned: list[Verdict]) -> str:
    joined = "" if len(runs.workdirs) == 1 else f" Joined from {len(runs.workdirs)} directories."
    other = "" if runs.same_question else _OTHER
    seeds = len(manifest.frozen.seeds)
    still_open = any(verdict.word == "inconclusive" for verdict in planned)
    few = f" With only {seeds} seeds, small differences cannot be told from chance." * (seeds < 5 and still_open)
    return (
        f"<h1>{escape(manifest.title)}</h1><p><b>{escape(finding(runs, planned))}</b></p>"
        f"<p class=soft>{len(manifest.arms)} arms, {seeds} seeds: {standing(runs)}. "
        f"Claims, seeds and tuning were frozen as <code>{manifest.frozen.hash}</code>.{few}{joined}{other}</p>"
    )


def _claim(verdict: Verdict, runs: Runs, manifest: Manifest) -> str:
    claim = verdict.claim
    source = f"<p><small class=soft>Source: {escape(claim.source)}</small></p>" if claim.source else ""
    head = f'<div class="claim {verdict.word}"><h3><span class=word>{verdict.word}</span> · {escape(claim.text)}</h3>'
    if isinstance(claim, AllOf):
        parts = "".join(_claim(part, runs, manifest) for part in verdict.parts)
        return f"{head}<p>Holds only if every part holds: {escape(verdict.reason)}.</p>{source}{parts}</div>"
    return head + source + _numbers(verdict, claim, runs, manifest) + "</div>"


def _numbers(verdict: Verdict, claim: Claim, runs: Runs, manifest: Manifest) -> str:
    asked = f"&gt; {claim.margin:g}" if claim.kind == "greater" else f"within ±{claim.margin:g}"
    scale = "log of " if claim.scale == "log_ratio" else ""
    low, high = verdict.interval
    lines = [
        f"Claimed: d = {escape(contrast_of(claim))} of {scale}<code>{escape(claim.metric)}</code> is {asked}.",
        f"Found: mean d <b>{number(verdict.mean)}</b>, 90 % interval [{number(low)}, {number(high)}]; "
        f"{escape(verdict.reason)}.",
    ]
    power = power_of(verdict, claim, len(list(elementary(manifest.frozen.claims))))
    shown = [escape(part) for part in beside(verdict, claim, runs)]
    lines += [f"{power[0].upper()}{power[1:]}."] if power else []
    lines.append(f"<small class=soft>Shown, never deciding: {'; '.join(shown)}.</small>")
    drawn = ""
    if any(math.isfinite(d) for d in verdict.values):
        name = f"seeds of: {claim.text} ({len(verdict.values)})"
        caption = "Each dot is one seed. The diamond is their mean with its 90 % interval; shaded is what was claimed."
        drawn = page.figure(plots.svg(plots.plot_claim(verdict, claim), name), caption)
    return "".join(f"<p>{line}</p>" for line in lines) + drawn


def _compared(runs: Runs, metric: str) -> str:
    header = [
        "arm",
        "seeds",
        "mean",
        "sd",
        "difference",
        "95 % interval",
        "p",
        "d_z",
        "r",
        "diverged",
        "Fisher p",
        "lost",
    ]
    rows = [
        (row.arm, row.seeds, number(row.mean), number(row.sd, 3), number(row.difference, 3),
         f"[{number(row.low, 3)}, {number(row.high, 3)}]" if math.isfinite(row.low) else "–", number(row.p, 3),
         number(row.d_z, 3),
         number(row.correlation, 2), row.diverged, number(row.divergence_p, 3), row.lost)
        for row in compare(runs, metric, runs.arms[0]).itertuples()
    ]  # fmt: skip
    caption = (
        f"Each arm against {runs.arms[0]}, paired by seed: p of a two-sided paired t without adjustment, d_z the mean "
        "difference over its standard deviation, r the correlation over seeds."
    )
    return page.table(header, rows, caption)


def _figures(runs: Runs, metric: str) -> str:
    drawn = [
        page.figure(
            plots.svg(plots.plot_effect(runs, metric, runs.arms[0]), f"effect on {metric}"),
            "Every seed, joined across arms; below, the mean difference with its 95 % t interval.",
        )
    ]
    curve = metric.partition("@")[0].replace("test/", "valid/")
    if all(len(run.curve(curve)) < 3 for run in runs.main()):
        curve = "train/loss"  # validated too seldom to be a curve
    if any(len(run.curve(curve)) for run in runs.main()):
        drawn.append(
            page.figure(
                plots.svg(plots.plot_cost(runs, curve), f"cost and {metric}"),
                f"{curve} at equal steps, equal time and equal FLOPs: mean and range over seeds. Time is counted from "
                "the first logged step, which leaves compiling out.",
            )
        )
    return f"<div class=figures>{''.join(drawn)}</div>"


def _tuning(runs: Runs, manifest: Manifest) -> str:
    tune = manifest.frozen.tune
    assert tune is not None
    done = [run for run in runs if run.phase == "tune" and tune["metric"] in run.result.get("metrics", {})]
    if not done:
        return "<p>No tuning run has ended.</p>"
    drawn = page.figure(plots.svg(plots.plot_tuning(runs), "tuning"), f"{tune['metric']} at each value, per arm.")
    ends = (tune["values"][0], tune["values"][-1])
    rows = []
    for arm in runs.arms:
        used = [run.config.get(tune["field"]) for run in runs.main() if run.arm == arm and run.config]
        edge = "the best lies at the edge of the grid" if used and used[0] in ends else ""
        rows.append((arm, used[0] if used else "–", edge))
    return drawn + page.table(["arm", tune["field"], ""], rows, "What each arm's tuning chose.", text=True)


def _differences(runs: Runs, manifest: Manifest) -> str:
    fields = list(dict.fromkeys(field for overrides in manifest.arms.values() for field in overrides))
    base = dict(_flat(manifest.base))
    rows = [
        [field, *(str(overrides.get(field, base.get(field))) for overrides in manifest.arms.values())]
        for field in fields
    ]
    first = {arm: next((run for run in runs.main() if run.arm == arm and run.result), None) for arm in manifest.arms}
    for size in SIZES:
        rows.append([size.replace("_", " "), *(number(run.result.get(size)) if run else "–" for run in first.values())])
    unequal = [row[0] for row in rows[len(fields) :] if len({cell for cell in row[1:] if cell != "–"}) > 1]
    said = f"Not matched: {', '.join(unequal)}." if unequal else "Parameters, FLOPs and tokens are matched."
    note = f"{said} Arms are paired by seed: the same order of the data and the same held-out sets."
    return f"<p>{escape(note)}</p>" + page.table(["", *manifest.arms], rows)


def _flat(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if not isinstance(tree, dict):
        return [(prefix[:-1], tree)]
    return [pair for name, value in tree.items() for pair in _flat(value, f"{prefix}{name}.")]


def _troubles(runs: Runs) -> str:
    parts = []
    for run in runs:
        if run.status == "diverged":
            parts.append(f"<p><b>{escape(run.name)} diverged.</b> {escape(str(run.result.get('message', '')))}</p>")
        elif run.status == "unreadable":
            parts.append(f"<p><b>{escape(run.name)} cannot be read here.</b> {escape(str(run.failure['reason']))}</p>")
        elif run.status == "failed":
            log = "\n".join(run.failure.get("log", []))
            parts.append(
                f"<p><b>{escape(run.name)} failed.</b> {escape(str(run.failure.get('reason', '')))}</p>"
                f"<details><summary>last lines of its log</summary><pre>{escape(log)}</pre></details>"
            )
    waiting = [run.name for run in runs if run.status == "waiting"]
    if waiting:
        names = ", ".join(waiting[:6]) + (" …" if waiting[6:] else "")
        parts.append(f"<p>{len(waiting)} runs have not ended: {escape(names)}</p>")
    return "".join(parts) or "<p>Every run finished.</p>"


def _every_number(runs: Runs) -> str:
    parts = []
    for metric in metrics_of(runs):
        if _has(runs, metric):
            found = values(runs, metric)
            rows = [(seed, *(number(value, 6) for value in row)) for seed, row in zip(found.index, found.to_numpy())]
            parts.append(page.table(["seed", *found], rows, metric))
    return f"<details><summary>every number</summary>{''.join(parts)}</details>"


def _provenance(runs: Runs) -> str:
    facts: dict[str, dict[str, list[str]]] = {}
    for run in runs:
        for start in (start for start in run.provenance if {"code", "device", "python", "packages"} <= start.keys()):
            code, device = start["code"], start["device"]
            dirty = " with local changes" if code["dirty"] else ""
            said = {
                "code": f"{code['commit'] or 'unknown'}{dirty}",
                "Python": start["python"],
                "device": f"{device['count']} x {device['kind']} ({device['platform']}), {device['host']}",
                **({"data": start["data"]} if start.get("data") else {}),
                **{name: version or "none" for name, version in start["packages"].items()},
            }
            for name, value in said.items():
                facts.setdefault(name, {}).setdefault(value, []).append(run.name)
    rows = [(name, "; ".join(f"{value} ({len(names)} starts)" if len(found) > 1 else value for value, names in
    found.items()))
            for name, found in facts.items()]  # fmt: skip
    return page.table(["", "found in the runs"], rows, text=True) if rows else "<p>No run has started.</p>"


def _reproduce(runs: Runs, manifest: Manifest) -> str:
    file = [f"--config={manifest.config_file}", *manifest.options]
    lines = [_command("sweep", *file, "--workdir=DIR"), _command("report", "--workdir=DIR")]
    example = next((run for run in runs.main() if run.result and run.arm in manifest.arms), None)
    if example is not None and "--quick" not in manifest.options:
        tune = manifest.frozen.tune
        settings = {**manifest.arms[example.arm], "seed": example.seed}
        settings |= {tune["field"]: example.config.get(tune["field"])} if tune else {}
        changes = [f"--config.{field}={value}" for field, value in settings.items()]
        lines += [f"# one run of it, {example.name}", _command("train", *file, *changes, "--workdir=RUN")]
    return f"<pre>{escape(chr(10).join(lines))}</pre>"


def _command(module: str, *options: str) -> str:
    """A command for a shell, an option a line where one line would be long."""
    words = [f"python -m experiments.{module}", *map(shlex.quote, options)]
    one = " ".join(words)
    return one if len(one) < 100 else " \\\n    ".join(words)


def _plain(verdict: Verdict) -> dict[str, Any]:
    """A verdict as JSON, which has no NaN."""
    data = {field.name: getattr(verdict, field.name) for field in dataclasses.fields(verdict)}
    data |= {"claim": claim_to_json(verdict.claim), "parts": [_plain(part) for part in verdict.parts]}
    data |= {"mean": verdict.mean, "interval": list(verdict.interval), "values": list(verdict.values)}
    return json.loads(json.dumps(data), parse_constant=lambda _: None)
