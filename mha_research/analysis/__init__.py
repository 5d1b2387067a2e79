"""Claims, verdicts, runs, comparisons, plots and the report page of an ablation."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mha_research.analysis.claims import AllOf as AllOf
    from mha_research.analysis.claims import Claim as Claim
    from mha_research.analysis.verdict import Outcome as Outcome
    from mha_research.analysis.verdict import Status as Status
    from mha_research.analysis.verdict import Verdict as Verdict
    from mha_research.analysis.verdict import judge as judge

_HOME = {
    "AllOf": "claims",
    "Claim": "claims",
    "Outcome": "verdict",
    "Status": "verdict",
    "Verdict": "verdict",
    "judge": "verdict",
}
__all__ = sorted(_HOME)


def __getattr__(
    name: str,
) -> Any:  # a sweep file that only states claims does not wait for scipy, pandas and matplotlib
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
