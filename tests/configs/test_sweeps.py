"""Every sweep that is shipped plans, builds every arm's model without arrays, and says what it costs."""

from pathlib import Path

import pytest

from mha_research.analysis.runs import SIZES
from mha_research.analysis.statistics.claims import elementary
from mha_research.sweeps.plan import load_sweep, plan
from mha_research.sweeps.sizes import sizes, unmatched

FOLDER = Path(__file__).parents[2] / "configs" / "sweeps"


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda file: file.stem)
def test_shipped_sweep(file):
    title, base, sweep = load_sweep(file)
    manifest = plan(title, f"configs/sweeps/{file.name}", base, sweep)
    found = sizes(manifest)
    assert title.endswith("?")
    assert set(found) == set(sweep.arms)
    assert sweep.claims
    assert f"--config=configs/sweeps/{file.name}" in file.read_text()
    # Arms of a shipped sweep have the same parameters and FLOPs, or its docstring says that they do not.
    assert (unmatched(found) == []) != ("the arms are not matched" in file.read_text())
    for claim in elementary(sweep.claims):
        assert claim.metric in SIZES or claim.metric.split("@")[0] in sweep.worst
