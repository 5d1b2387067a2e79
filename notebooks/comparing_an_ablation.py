# %% [markdown]
# # Comparing the arms of an ablation
#
# A small sweep, made here so that this page needs nothing else: does recall need more than one head? It is cut down to
# seconds and to two of its arms, so the claim about the arm that is left out comes out as incomplete.

# %%
import tempfile
from pathlib import Path

from experiments import sweep
from mha_research.analysis import compare, load_runs, plot_cost, plot_effect, verdicts

workdir = Path(tempfile.mkdtemp()) / "recall"
small = ["train.steps=60", "train.eval_every=20", "task.length=16", "model.d_model=16", "model.num_layers=1"]
small += ["model.attention.implementation=reference", "model.attention.position.name=none"]
code = sweep.main(
    [
        "--config=configs/sweeps/recall.py",
        f"--workdir={workdir}",
        "--only=h1,h8",
        *(f"--config.{change}" for change in small),
    ]
)

# %% [markdown]
# Every run is a directory of plain files; `load_runs` reads them, also while the sweep goes on.

# %%
runs = load_runs(workdir)
runs.table()[["name", "status", "parameters", "test/loss", "test/accuracy"]].head(8)

# %%
compare(runs, "test/loss", baseline="h1").round(3)

# %% [markdown]
# The thin lines join one seed across the arms: pairing by seed is what makes small differences visible.

# %%
plot_effect(runs, "test/loss", baseline="h1")

# %%
plot_cost(runs, "valid/loss")

# %% [markdown]
# What was claimed before the runs started, and what became of it.

# %%
planned, exploratory = verdicts(runs)
for verdict in planned:
    print(f"{verdict.word}: {verdict.claim.text} ({verdict.reason})")

# %% [markdown]
# A run gives its model back.

# %%
model = runs[0].restore()
type(model)
