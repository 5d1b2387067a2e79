"""How often the verdict rule is wrong, by simulation: `python -m mha_research.analysis.statistics.calibration --write
docs/statistics.md`.

A contrast is drawn with its true value exactly on the boundary of the claim (d = margin; |d| = margin), where supported
and contradicted are both false. Noise of an arm at a seed is sqrt(r) u_s + sqrt(1 - r) e_(a, s): the part u_s that all
arms share is what pairing removes. Everything has unit variance. The p-values are those of `verdict.p_values`, so what
is checked is the rule itself.
"""

import argparse
import dataclasses
import gc
import pathlib
from collections.abc import Callable, Sequence

import numpy as np
from scipy import stats

from mha_research.analysis.statistics.claims import Claim, Kind
from mha_research.analysis.statistics.power import detectable, power
from mha_research.analysis.statistics.verdict import ALPHA, Outcome, judge, p_values

SEEDS = (3, 5, 8)
BEGIN, END = "<!-- begin: python -m mha_research.analysis.statistics.calibration -->", "<!-- end -->"
Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]

# Student's t with 3 degrees of freedom has variance 3; exp(z) has mean e^(1/2), variance e (e - 1) and skewness 6.2.
NOISES: dict[str, Draw] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "heavy-tailed (t, 3 df)": lambda rng, shape: rng.standard_t(3, shape) / np.sqrt(3),
    "skewed (log-normal)": lambda rng, shape: (rng.lognormal(size=shape) - np.exp(0.5)) / np.sqrt(np.e * (np.e - 1)),
}


@dataclasses.dataclass(frozen=True)
class Arms:
    """Arms of a simulated sweep: the contrast's coefficients, how noisy each arm is, and the correlation over seeds
    between them."""

    name: str
    contrast: Sequence[float] = (1.0, -1.0)
    spread: Sequence[float] = (1.0, 1.0)
    correlation: float = 0.0


EQUAL = (
    Arms("two arms"),
    Arms("two arms, correlation 0.8", correlation=0.8),
    Arms("trend over four arms", (-1.5, -0.5, 0.5, 1.5), (1.0,) * 4),
)
UNEQUAL = (
    Arms("one arm against the mean of three", (1.0, -1 / 3, -1 / 3, -1 / 3), (1.0,) * 4),
    Arms("one arm twice as noisy", spread=(2.0, 1.0)),
    Arms("one arm has all the noise", spread=(1.0, 0.0)),
)


def contrasts(arms: Arms, noise: str, seeds: int, draws: int, rng: np.random.Generator) -> np.ndarray:
    """Contrasts (draws, seeds) with mean zero and unit standard deviation."""
    c, spread = np.asarray(arms.contrast)[:, None], np.asarray(arms.spread)[:, None]
    own = NOISES[noise](rng, (draws, len(c), seeds))
    shared = NOISES[noise](rng, (draws, 1, seeds))
    y = spread * (np.sqrt(arms.correlation) * shared + np.sqrt(1 - arms.correlation) * own)
    variance = (1 - arms.correlation) * ((c * spread) ** 2).sum() + arms.correlation * (c * spread).sum() ** 2
    return (c * y).sum(1) / np.sqrt(variance)


def error_rates(
    arms: Arms, noise: str, seeds: int, kind: Kind, draws: int, rng: np.random.Generator, margin: float = 2.0
) -> tuple[float, float]:
    """(false supported, false contradicted) of one claim with d on the boundary; the worse of d = margin and d =
    -margin for "within"."""
    noise_values = contrasts(arms, noise, seeds, draws, rng)
    rates = [
        [np.mean(p <= ALPHA) for p in p_values(sign * margin + noise_values, kind, margin)]
        for sign in ((1,) if kind == "greater" else (1, -1))
    ]
    false_supported, false_contradicted = np.max(rates, axis=0)
    return float(false_supported), float(false_contradicted)


def simulated_power(seeds: int, kind: Kind, size: float, draws: int, rng: np.random.Generator) -> float:
    """The share of claims supported under normal noise; the effect is `size` beyond the margin, or zero within a margin
    of `size`."""
    d = contrasts(EQUAL[0], "normal", seeds, draws, rng)
    p_sup, _ = p_values(d + size, "greater", 0.0) if kind == "greater" else p_values(d, "within", size)
    return float(np.mean(p_sup <= ALPHA))


def family_error(seeds: int, draws: int, rng: np.random.Generator) -> tuple[float, float]:
    """(any false supported, any false contradicted) among three claims that share a baseline, all on their boundary,
    through `judge` itself."""
    claims = [Claim(text=arm, metric="y", contrast={arm: 1, "base": -1}) for arm in "abc"]
    wrong = np.zeros(2)
    # statsmodels collects garbage on every call, which dominates unless what is loaded is left out
    gc.freeze()
    for y in rng.standard_normal((draws, 4, seeds)):
        outcomes = {
            arm: {s: Outcome(metrics={"y": value}) for s, value in enumerate(row)}
            for arm, row in zip(("a", "b", "c", "base"), y, strict=True)
        }
        words = [verdict.word for verdict in judge(claims, outcomes, range(seeds))]
        wrong += ["supported" in words, "contradicted" in words]
    gc.unfreeze()
    return float(wrong[0] / draws), float(wrong[1] / draws)


def bca_coverage(seeds: int, draws: int, rng: np.random.Generator) -> float:
    """How often the nominal 95 % BCa interval of the mean of `seeds` normal numbers covers the true mean."""
    d = rng.standard_normal((draws, seeds))
    interval = stats.bootstrap(
        (d,), np.mean, axis=-1, n_resamples=999, batch=100, method="BCa", rng=rng
    ).confidence_interval
    return float(np.mean((interval.low <= 0) & (interval.high >= 0)))


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows])


def _error_table(group: Sequence[Arms], noises: Sequence[str], draws: int, rng: np.random.Generator) -> str:
    header = ["arms", "noise", "claim", *(f"{n} seeds: supported / contradicted" for n in SEEDS)]
    rows = []
    for arms in group:
        for noise in noises:
            for kind in ("greater", "within"):
                rates = [error_rates(arms, noise, n, kind, draws, rng) for n in SEEDS]
                rows.append([arms.name, noise, kind, *(f"{100 * s:.1f} % / {100 * c:.1f} %" for s, c in rates)])
    return _table(header, rows)


def _power_table(draws: int, rng: np.random.Generator) -> str:
    rows = []
    for n in (*SEEDS, 16):
        row = [str(n)]
        for kind in ("greater", "within"):
            size = detectable(n, kind)
            half, full = (simulated_power(n, kind, share * size, draws, rng) for share in (0.5, 1.0))
            row += [
                f"{size:.2f}",
                f"{100 * full:.0f} %",
                f"{100 * half:.0f} % ({100 * power(size / 2, n, kind):.0f} %)",
            ]
        rows.append(row)
    header = [
        "seeds",
        "greater: effect beyond the margin",
        "supported",
        "supported at half of it (formula)",
        "within: margin, with no effect",
        "supported",
        "supported at half of it (formula)",
    ]
    return _table(header, rows)


def tables(draws: int) -> str:
    """The tables of docs/statistics.md as Markdown, from `draws` simulated contrasts a cell."""
    rng = np.random.default_rng(20170612)
    family = [family_error(n, draws // 25, rng) for n in SEEDS]
    coverage = [[f"{100 * bca_coverage(n, draws // 25, rng):.0f} %" for n in (*SEEDS, 16)]]
    error = 100 * np.sqrt(ALPHA * (1 - ALPHA) / draws)
    return "\n\n".join(
        [
            f"{draws} draws a cell: one standard error of a rate of 5 % is {error:.2f} points.",
            "### Arms with equal noise",
            _error_table(EQUAL, list(NOISES), draws, rng),
            "### Arms with unequal noise, or a lopsided contrast",
            _error_table(UNEQUAL, list(NOISES), draws, rng),
            "### Power under normal noise, in standard deviations of the contrast",
            _power_table(draws, rng),
            f"### Three claims that share a baseline, any of them wrong ({draws // 25} draws)",
            _table(
                [f"{n} seeds: supported / contradicted" for n in SEEDS],
                [[f"{100 * s:.1f} % / {100 * c:.1f} %" for s, c in family]],
            ),
            f"### Coverage of the nominal 95 % BCa interval, normal noise ({draws // 25} draws)",
            _table([f"{n} seeds" for n in (*SEEDS, 16)], coverage),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how often the verdict rule is wrong.")
    parser.add_argument("--draws", type=int, default=100_000)
    parser.add_argument(
        "--write", type=pathlib.Path, help="a Markdown file with a begin and an end marker, between which the tables go"
    )
    arguments = parser.parse_args()
    text = tables(arguments.draws)
    if arguments.write is None:
        print(text)
        return
    before, _, rest = arguments.write.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    arguments.write.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


if __name__ == "__main__":
    main()
