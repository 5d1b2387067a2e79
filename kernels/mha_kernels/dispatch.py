"""Which implementation runs, and why not another one."""

import dataclasses
import functools
import logging
from typing import Any

import jax

from mha_kernels import reference, sharding
from mha_kernels.algebra.spec import AttentionSpec, HeadStatistics
from mha_kernels.blockwise import Blockwise
from mha_kernels.jax_nn import JaxNN
from mha_kernels.native import Native
from mha_kernels.native.library import is_built
from mha_kernels.pallas.gpu.forward import PallasGPU
from mha_kernels.pallas.tpu.forward import PallasTPU
from mha_kernels.tiled.transforms import run

log = logging.getLogger("mha_kernels")

NAMED: dict[str, Any] = {
    "reference": reference.Reference(),
    "blockwise": Blockwise(),
    "native": Native(),
    "pallas_tpu": PallasTPU(),
    "pallas_gpu": PallasGPU(),
    "xla": JaxNN("xla"),
    "cudnn": JaxNN("cudnn"),
}
# What "auto" tries, best first, on each kind of device; the last of each always can. "native" counts once it is built.
PREFERRED = {
    "cpu": ("native", "blockwise"),
    "gpu": ("cudnn", "pallas_gpu", "blockwise"),
    "tpu": ("pallas_tpu", "blockwise"),
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What would run: `implementation` by name, its `tiles` (empty without tiles), and why each other one
    `declined`."""

    implementation: str
    tiles: dict[str, int]
    declined: dict[str, str]

    def __str__(self) -> str:
        tiles = ", ".join(f"{name} {size}" for name, size in self.tiles.items())
        lines = [self.implementation + (f" ({tiles})" if tiles else "")]
        return "\n".join(lines + [f"  not {name}: {reason}" for name, reason in self.declined.items()])


def choose(
    implementation: Any,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    algebra: AttentionSpec,
    statistics: tuple[str, ...],
) -> tuple[Any, dict[str, str]]:
    """The implementation to run, and the reason of each that was tried before it.

    Raises:
        ValueError: the named implementation cannot do the job, or there is none of that name.
        TypeError: it is neither a name nor an object with tile sizes.
    """
    problem = (query, key, value, algebra, statistics)
    if isinstance(implementation, str) and implementation == "auto":
        declined: dict[str, str] = {}
        for name in PREFERRED.get(jax.default_backend(), ("blockwise",)):
            if name == "native" and not is_built():
                continue
            reason = NAMED[name].unsupported_reason(*problem)
            if reason is None:
                _say(name, tuple(declined.items()))
                return NAMED[name], declined
            declined[name] = reason
        raise AssertionError("the last preferred implementation never declines")
    if isinstance(implementation, str):
        if implementation not in NAMED:
            raise ValueError(f"implementation is {implementation!r}; expected 'auto' or one of {', '.join(NAMED)}")
        chosen = NAMED[implementation]
    elif hasattr(implementation, "unsupported_reason") and not isinstance(implementation, type):
        chosen = implementation
    else:
        raise TypeError(
            f"implementation is a {type(implementation).__name__}; expected a name or an object such as Blockwise()"
        )
    reason = chosen.unsupported_reason(*problem)
    if reason is not None:
        raise ValueError(f"implementation {implementation!r} cannot do this: {reason}")
    return chosen, {}


@functools.cache
def _say(name: str, declined: tuple[tuple[str, str], ...]) -> None:
    """Once for each choice and its reasons."""
    reasons = "".join(f"; not {other}: {reason}" for other, reason in declined)
    log.log(logging.WARNING if declined else logging.INFO, "attention runs on %s%s", name, reasons)


def attend(
    implementation: Any,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    algebra: AttentionSpec,
    statistics: tuple[str, ...],
    precision: Any,
) -> tuple[jax.Array, HeadStatistics]:
    """Runs the chosen implementation."""
    chosen, _ = choose(implementation, query, key, value, algebra, statistics)
    if isinstance(chosen, JaxNN):  # it reads scale and window as Python numbers
        return chosen.attend(query, key, value, algebra, statistics, precision)

    def work(query: jax.Array, key: jax.Array, value: jax.Array, algebra: AttentionSpec) -> Any:
        return _compiled(chosen, query, key, value, algebra, statistics, precision)

    spread = sharding.active()
    if spread is not None:
        return sharding.run(spread, work, query, key, value, algebra)
    return work(query, key, value, algebra)


@functools.partial(jax.jit, static_argnums=(0, 5, 6))
def _compiled(
    chosen: Any,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    algebra: AttentionSpec,
    statistics: tuple[str, ...],
    precision: Any,
) -> tuple[jax.Array, HeadStatistics]:
    """Under `jit`, so that a call outside one compiles once, and equal layers inside one are traced once."""
    if isinstance(chosen, reference.Reference):
        return chosen.attend(query, key, value, algebra, statistics, precision)
    return run(chosen, query, key, value, algebra, statistics, precision)


def plan(
    implementation: Any,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    algebra: AttentionSpec,
    statistics: tuple[str, ...],
) -> Plan:
    """See `api.explain`."""
    chosen, _ = choose(implementation, query, key, value, algebra, statistics)
    kind = type(chosen), getattr(chosen, "name", None)
    [own] = [name for name, named in NAMED.items() if (type(named), getattr(named, "name", None)) == kind]
    reasons = {name: NAMED[name].unsupported_reason(query, key, value, algebra, statistics) for name in NAMED}
    tiles = chosen.tiles(query, key, algebra) if hasattr(chosen, "tiles") else {}
    return Plan(own, tiles, {name: reason for name, reason in reasons.items() if reason and name != own})
