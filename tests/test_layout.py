"""The shape of the repository: which package may import which, and how long a file may grow."""

import ast
import configparser
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# What a layer may import from this repository, besides itself. What is not listed here may be imported by nobody but
# experiments, which sit on top of everything. Order and reasons: docs/layout.md.
ATTENTION = {"mha_kernels", "mha_research.attention"}
MADE = {"mha_research.config", "mha_research.factory", "mha_research.models", "mha_research.tasks"}
MAY_IMPORT = {
    "mha_kernels": set(),
    "mha_research.attention": {"mha_kernels"},
    "mha_research.config": set(),
    "mha_research.models": ATTENTION,
    "mha_research.tasks": set(),
    "mha_research.factory": ATTENTION | {"mha_research.config", "mha_research.models", "mha_research.tasks"},
    "mha_research.run_dir": {"mha_research.config"},
    "mha_research.training": ATTENTION | MADE | {"mha_research.run_dir"},
    "mha_research.interop": ATTENTION | {"mha_research.models"},
    # Training, to restore the model of a run that is reported.
    "mha_research.analysis": {
        "mha_research.config",
        "mha_research.factory",
        "mha_research.run_dir",
        "mha_research.training",
    },
    "mha_research.export": {
        "mha_research.analysis",
        "mha_research.config",
        "mha_research.factory",
        "mha_research.interop",
        "mha_research.run_dir",
        "mha_research.tasks",
    },
    "mha_research.sweeps": MADE | {"mha_research.analysis", "mha_research.run_dir", "mha_research.training"},
}
OURS = ("mha_kernels", "mha_research", "experiments", "configs", "tests")


def layer(module: str) -> str:
    """The part of the repository that a module lies in: `mha_research.models.decoder` is in `mha_research.models`."""
    return ".".join(module.split(".")[: 2 if module.startswith("mha_research") else 1])


def imported_modules(source: str, module: str) -> set[str]:
    """Absolute names of every module that a source file imports, lazily or not.

    `module` is its own dotted name, which relative imports start from.
    """
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(module.split(".")[: -node.level]) + "." if node.level else ""
            parent = f"{base}{node.module or ''}".rstrip(".")
            # `from mha_research import models` imports mha_research.models: the name counts where the parent is a root.
            names |= {f"{parent}.{alias.name}" for alias in node.names} if parent in OURS else {parent}
    return names


def forbidden(source: str, module: str) -> set[str]:
    """Layers of this repository that the file may not import but does."""
    home = layer(module)
    used = {layer(name) for name in imported_modules(source, module) if name.split(".")[0] in OURS}
    return used - {home} - MAY_IMPORT.get(home, set())


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def dotted(path: Path) -> str:
    relative = path.relative_to(ROOT / "kernels" if ROOT / "kernels" in path.parents else ROOT)
    return ".".join(relative.with_suffix("").parts)


@pytest.mark.parametrize(
    "source, module, expected",
    [
        ("import mha_research.models.decoder", "mha_research.attention.alibi", {"mha_research.models"}),
        ("from mha_research import models", "mha_research.tasks.char_lm", {"mha_research.models"}),
        ("from ..training import step", "mha_research.models.decoder", {"mha_research.training"}),
        ("def f():\n    from experiments import train", "mha_research.training.loop", {"experiments"}),
        ("from .alibi import Alibi\nimport mha_kernels", "mha_research.attention.rotary", set()),
        ("import numpy as np", "mha_kernels.masks", set()),
    ],
)
def test_forbidden_imports_are_seen(source: str, module: str, expected: set[str]) -> None:
    assert forbidden(source, module) == expected


def test_dependencies_point_one_way() -> None:
    wrong = {
        dotted(path): bad
        for path in sources("kernels/mha_kernels", "mha_research")
        if path != ROOT / "mha_research/__init__.py" and (bad := forbidden(path.read_text(), dotted(path)))
    }
    assert not wrong


def test_the_listed_dependencies_have_an_order() -> None:
    TopologicalSorter(MAY_IMPORT).prepare()  # raises CycleError


def test_every_layer_is_listed() -> None:
    folders = {f"mha_research.{path.parent.name}" for path in (ROOT / "mha_research").glob("*/__init__.py")}
    assert folders <= set(MAY_IMPORT)


def test_every_package_is_in_the_distribution() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    inits = [path for path in sources("kernels/mha_kernels", "mha_research") if path.name == "__init__.py"]
    assert setup["options"]["packages"].split() == [dotted(path).removesuffix(".__init__") for path in inits]


def test_mha_kernels_imports_jax_and_numpy_alone() -> None:
    allowed = {*sys.stdlib_module_names, "jax", "numpy", "mha_kernels"}
    for path in sources("kernels/mha_kernels"):
        roots = {name.split(".")[0] for name in imported_modules(path.read_text(), dotted(path))}
        assert roots <= allowed, path


def test_importing_mha_research_brings_in_nothing_heavy() -> None:
    """Everything is reached on first use, so the import costs next to nothing beyond the interpreter's start."""
    code = "import sys, mha_research; print(*{'jax', 'flax', 'grain', 'orbax', 'pandas'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""
