"""What statistics and closed heads cost on the CPU, beside plain attention, interleaved in one process.

    python kernels/benchmarks/costs.py [--length 2048] [--causal] [--repeats 9] [--implementation native]

Statistics: time over that of plain attention. Head gates closed at rate p: the share of the time that is saved, and
that share over p, where 1 is everything that could be saved.
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cpu import jitted, medians

import mha_kernels as mk

STATISTICS = {"lse": ("lse",), "lse and entropy": ("lse", "entropy"), "all": mk.STATISTICS}
RATES = (0.25, 0.5, 0.75)


def runs(arrays: list[jax.Array], backward: bool, causal: bool, implementation: str) -> dict[str, Callable[[], Any]]:
    """Plain attention, with each set of statistics, and with heads closed at each rate."""
    mask = mk.CausalMask() if causal else None
    batch, _, heads, _ = arrays[0].shape

    def with_statistics(names: tuple[str, ...]) -> Callable[..., Any]:
        def call(query: Any, key: Any, value: Any) -> Any:
            output, found = mk.attention_with_statistics(
                query, key, value, mask=mask, statistics=names, implementation=implementation
            )
            # The loss reads the statistics too, so that nothing of them is left out.
            kept = [getattr(found, name) for name in names]
            return output + sum(jnp.where(jnp.isfinite(x), x, 0).swapaxes(1, 2)[..., None] for x in kept)

        return call

    def with_gate(rate: float) -> Callable[..., Any]:
        gate = np.ones(batch * heads, np.float32)
        gate[np.random.default_rng(0).permutation(gate.size)[: round(rate * gate.size)]] = 0
        gate = jnp.asarray(gate.reshape(batch, heads))

        def call(query: Any, key: Any, value: Any) -> Any:
            return mk.attention(query, key, value, mask=mask, head_gate=gate, implementation=implementation)

        return call

    def plain(query: Any, key: Any, value: Any) -> Any:
        return mk.attention(query, key, value, mask=mask, implementation=implementation)

    calls = {"plain": plain}
    calls |= {name: with_statistics(names) for name, names in STATISTICS.items()}
    calls |= {f"closed {rate}": with_gate(rate) for rate in RATES}
    return {name: jitted(call, arrays, backward) for name, call in calls.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--implementation", default="blockwise", choices=("blockwise", "native"))
    options = parser.parse_args()
    random = np.random.default_rng(0)
    arrays = [jnp.asarray(random.standard_normal((1, options.length, 8, 64)), jnp.float32) for _ in range(3)]
    for backward in (False, True):
        found = medians(runs(arrays, backward, options.causal, options.implementation), options.repeats)
        base = found["plain"]
        print(f"{'forward and backward' if backward else 'forward'}: plain {1e3 * base:.1f} ms")
        for name in STATISTICS:
            print(f"  {name}: {found[name] / base:.3f} of plain")
        for rate in RATES:
            saved = 1 - found[f"closed {rate}"] / base
            print(f"  closed {rate}: saves {saved:.3f}, {saved / rate:.2f} of the rate")


if __name__ == "__main__":
    main()
