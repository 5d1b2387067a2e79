"""Attention mathematics stands in algebra/tile.py and in the operands; whatever moves data holds no copy of it."""

import ast
from pathlib import Path

import pytest

import mha_kernels

HOME = Path(mha_kernels.__file__).parent
MOVES_DATA = (
    "reference",
    *("tiled/driver", "tiled/transforms", "tiled/sizes", "tiled/relative"),
    *("blockwise/driver", "blockwise/grid", "blockwise/gram"),
    *("pallas/kernel_tiles", "pallas/tpu/forward", "pallas/tpu/backward", "pallas/tpu/operands"),
    *("pallas/gpu/forward", "pallas/gpu/backward", "pallas/gpu/operands", "pallas/gpu/mosaic", "pallas/gpu/registers"),
    *("native/driver", "native/operands"),
)
# A softmax, a cap or a statistic cannot be written without one of these,
CALLS = {
    *("exp", "exp2", "expm1", "log", "log1p", "log2", "logaddexp", "logsumexp", "softmax", "log_softmax"),
    *("tanh", "sigmoid", "logistic", "erf", "maximum", "max", "amax", "cummax", "abs"),
}
# nor can scaling, biasing, masking or dropping without reading one of these of an operand.
READS = {"scale", "softcap", "allowed", "keep", "tile"}
# Indices of tiles are compared, primitives are spelled out for a compiler that lacks them; neither sees a score.
ALLOWED = {
    ("pallas/kernel_tiles", "schedule_tiles", "maximum"),
    ("pallas/kernel_tiles", "schedule_tiles", "max"),
    ("pallas/tpu/operands", "visited", "maximum"),
    ("blockwise/grid", "_range", "max"),
    ("pallas/gpu/registers", "", "exp"),
    ("pallas/gpu/registers", "", "log"),
    ("pallas/gpu/registers", "", "abs"),
    # Hands these over to C++, whose formulas are the second copy that speed is paid with: docs/algebra.md.
    ("native/operands", "operands", "scale"),
    ("native/operands", "_masks", "keep"),
    ("native/operands", "_is_line", "tile"),  # only compared
}
FROM_PYTHON = {"max", "abs"}  # as plain names these are Python's own, of sizes


def mathematics(source: str) -> set[tuple[str, str]]:
    """(innermost function, name) of every call and read that belongs in a tile function."""
    found: set[tuple[str, str]] = set()

    def look(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef):
            function = node.name
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            plain = isinstance(node.func, ast.Name)
            if name in CALLS and not (plain and name in FROM_PYTHON):
                found.add((function, name))
        if isinstance(node, ast.Attribute) and node.attr in READS:
            found.add((function, node.attr))
        if isinstance(node, ast.ImportFrom):  # `from jax.numpy import exp as e` would hide the name
            found.update((function, alias.name) for alias in node.names if alias.name in CALLS)
        for child in ast.iter_child_nodes(node):
            look(child, function)

    look(ast.parse(source), "")
    return found


@pytest.mark.parametrize("module", MOVES_DATA)
def test_what_moves_data_holds_no_mathematics(module: str) -> None:
    allowed = {(function, name) for place, function, name in ALLOWED if place == module}
    found = mathematics((HOME / f"{module}.py").read_text())
    assert found - allowed == set()
    assert allowed - found == set(), "an exception that nothing needs any more"


@pytest.mark.parametrize(
    "copy, seen",
    [
        ("def step(s, m):\n    return jnp.exp(s - m)", ("step", "exp")),
        ("def step(s):\n    new = s.max(axis=-1)", ("step", "max")),
        ("def step(s):\n    return jax.nn.softmax(s)", ("step", "softmax")),
        ("def cap(s, a):\n    return lax.tanh(s)", ("cap", "tanh")),
        ("def f(q, k, algebra):\n    return q @ k * algebra.scale", ("f", "scale")),
        ("def f(s, algebra, at):\n    return s + algebra.bias.tile(at)", ("f", "tile")),
        ("def f(p, dropout, at):\n    return p * dropout.keep(at)", ("f", "keep")),
        ("from jax.numpy import exp as e", ("", "exp")),
    ],
)
def test_a_planted_copy_is_seen(copy: str, seen: tuple[str, str]) -> None:
    driver = (HOME / "pallas/tpu/forward.py").read_text()
    assert mathematics(driver + "\n\n" + copy) - mathematics(driver) == {seen}


def test_every_module_is_either_mathematics_or_moves_data() -> None:
    """A new file has to be put on one side or the other."""
    mathematical = {f"algebra/{name}" for name in ("tile", "masks", "biases", "dropout", "operands", "spec")}
    outside = {"api", "arguments", "dispatch", "sharding", "jax_nn", "jax_nn_api", "tuned", "autotune"}
    outside |= {"native/__main__", "native/library"}
    found = {str(path.relative_to(HOME).with_suffix("")) for path in HOME.rglob("*.py") if path.stem != "__init__"}
    assert found == mathematical | outside | set(MOVES_DATA)
