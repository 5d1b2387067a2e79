"""Claims, verdicts, runs, comparisons, plots and the report page of an ablation."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mha_research.analysis.report.ablation_plots import plot_claim as plot_claim
    from mha_research.analysis.report.ablation_plots import plot_cost as plot_cost
    from mha_research.analysis.report.ablation_plots import plot_curves as plot_curves
    from mha_research.analysis.report.ablation_plots import plot_effect as plot_effect
    from mha_research.analysis.report.ablation_plots import plot_heads as plot_heads
    from mha_research.analysis.report.ablation_plots import plot_tuning as plot_tuning
    from mha_research.analysis.runs import load_runs as load_runs
    from mha_research.analysis.statistics.claims import AllOf as AllOf
    from mha_research.analysis.statistics.claims import Claim as Claim
    from mha_research.analysis.statistics.comparison import compare as compare
    from mha_research.analysis.statistics.comparison import verdicts as verdicts
    from mha_research.analysis.statistics.verdict import Outcome as Outcome
    from mha_research.analysis.statistics.verdict import Status as Status
    from mha_research.analysis.statistics.verdict import Verdict as Verdict
    from mha_research.analysis.statistics.verdict import judge as judge

_HOME = {
    **dict.fromkeys(("plot_claim", "plot_cost", "plot_curves"), "report.ablation_plots"),
    **dict.fromkeys(("plot_effect", "plot_heads", "plot_tuning"), "report.ablation_plots"),
    **dict.fromkeys(("AllOf", "Claim"), "statistics.claims"),
    **dict.fromkeys(("compare", "verdicts"), "statistics.comparison"),
    **dict.fromkeys(("Outcome", "Status", "Verdict", "judge"), "statistics.verdict"),
    "load_runs": "runs",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    # Lazy: a sweep file that only states claims does not wait for scipy, pandas and matplotlib.
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
