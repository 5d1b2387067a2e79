"""Sharded over batch and heads on four devices: the numbers of the unsharded run, gradients reduced."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

import mha_kernels as mk

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
import mha_kernels as mk
from jax.sharding import PartitionSpec as P

assert len(jax.devices()) == 4
B, Q, K, H, G, E = 2, 5, 7, 4, 2, 3
rng = np.random.default_rng(0)
normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
params = {"query": normal(B, Q, H, E), "key": normal(B, K, G, E), "value": normal(B, K, G, E), "sink": normal(H),
          "slopes": normal(H), "table": normal(1, 5), "dense": normal(1, H, 1, K),
          "gate": jnp.ones((B, H)).at[1, 2].set(0)}
specs = {"query": P("b", None, "h"), "key": P("b", None, "h"), "value": P("b", None, "h"), "sink": P("h"),
         "slopes": P("h"), "table": P(), "dense": P(None, "h"), "gate": P("b", "h")}
keep = jnp.asarray(rng.random((B, K)) < 0.8)
seed = jax.random.key(3)
mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

def attend(p, keep, origin):
    return mk.attention_with_statistics(
        p["query"], p["key"], p["value"], mask=mk.CausalMask(1) & mk.KeyPaddingMask(keep),
        bias=mk.AlibiBias(p["slopes"]) + mk.ClippedBias(p["table"]) + mk.DenseBias(p["dense"]), sink=p["sink"],
        head_gate=p["gate"], dropout=mk.Dropout(0.3, seed), origin=origin, statistics="entropy",
        implementation=IMPLEMENTATION)

def whole(p):
    output, statistics = attend(p, keep, mk.Origin())
    return (output ** 2).sum() + jnp.nan_to_num(statistics.entropy).sum(), (output, statistics.entropy)

def part(p, keep):
    origin = mk.Origin(batch=jax.lax.axis_index("b") * (B // 2), head=jax.lax.axis_index("h") * (H // 2))
    output, statistics = attend(p, keep, origin)
    return output, statistics.entropy

sharded_attention = jax.shard_map(
    part, mesh=mesh, in_specs=(specs, P("b")), out_specs=(P("b", None, "h"), P("b", "h")), check_vma=True)

def sharded(p):
    output, entropy = sharded_attention(p, keep)
    return (output ** 2).sum() + jnp.nan_to_num(entropy).sum(), (output, entropy)

def entered(p):
    with mk.sharded(mesh, "b", "h"):
        return whole(p)

for IMPLEMENTATION in ("reference", mk.Blockwise(2, 3)):
    expected = jax.jit(jax.grad(whole, has_aux=True))(params)
    for f in (sharded, entered):
        found = jax.jit(jax.grad(f, has_aux=True))(params)
        for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=5e-6, err_msg=str(path))
try:
    with mk.sharded(mesh, ("b", "h"), None):
        whole(params)
except ValueError as error:
    assert "query has batch size 2 and key has 2 heads; expected multiples of 4 and 1" in str(error), error
print("same")
"""


def test_shards_compute_what_the_whole_does() -> None:
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        env={
            "PYTHONPATH": f"{root}:{root / 'kernels'}",
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout == "same\n", run.stderr


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (("data",), TypeError, "mesh is 'data'; expected a jax.sharding.Mesh"),
        ((None, "x"), ValueError, "no axis 'x'; expected one of"),
        ((None, "data", "data"), ValueError, "batch is 'data' and heads 'data'; expected each axis once"),
    ],
    ids=str,
)
def test_what_is_no_mesh_or_axis_is_named(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    mesh, *axes = (arguments[0] or mesh, *arguments[1:])
    with pytest.raises(error, match=message), mk.sharded(mesh, *axes):
        pass
