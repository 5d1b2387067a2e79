"""Blockwise is O(L) in memory, forward and backward, and holds no Q x K array in the compiled program."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import mha_kernels as mk

H, E = 2, 4
TILES = mk.Blockwise(32, 16)


def compiled(length: int, implementation: Any = TILES) -> Any:
    """Causal attention with ALiBi and all statistics: output, statistics and every gradient."""

    def run(query: Any, key: Any, value: Any, slopes: Any) -> Any:
        def loss(query: Any, key: Any, value: Any, slopes: Any) -> Any:
            output, statistics = mk.attention_with_statistics(
                query, key, value, mask=mk.CausalMask(), bias=mk.AlibiBias(slopes), implementation=implementation
            )
            return (output**2).sum() + statistics.entropy.sum() + statistics.lse.sum(), statistics

        return jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(query, key, value, slopes)

    array = jax.ShapeDtypeStruct((1, length, H, E), jnp.float32)
    return jax.jit(run).lower(array, array, array, jax.ShapeDtypeStruct((H,), jnp.float32)).compile()


def largest_array(program: Any) -> int:
    """Entries of the largest array in the text of a compiled program."""
    shapes = re.findall(r"\b(?:f16|bf16|f32|f64|pred|[su]\d+)\[([\d,]+)\]", program.as_text())
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


def test_memory_grows_with_the_length_and_not_with_its_square() -> None:
    short, long = compiled(256), compiled(1024)
    ratio = long.memory_analysis().temp_size_in_bytes / short.memory_analysis().temp_size_in_bytes
    assert ratio < 4.2
    for program, length in ((short, 256), (long, 1024)):
        assert largest_array(program) < length * length


def test_the_measure_sees_a_dense_array() -> None:
    assert largest_array(compiled(256, "reference")) >= 256 * 256


@pytest.mark.parametrize("statistics", [(), None])
def test_the_forward_pass_alone_is_linear_too(statistics: Any) -> None:
    def bytes_at(length: int) -> int:
        array = jax.ShapeDtypeStruct((1, length, H, E), jnp.float32)
        options: dict[str, Any] = {"mask": mk.CausalMask(), "implementation": TILES, "statistics": statistics}
        run = jax.jit(lambda q, k, v: mk.attention_with_statistics(q, k, v, **options))
        return run.lower(array, array, array).compile().memory_analysis().temp_size_in_bytes

    assert bytes_at(2048) < 4.2 * bytes_at(512)


def test_hessian_vector_products_hold_no_map_either() -> None:
    length = 1024
    array = jax.ShapeDtypeStruct((1, length, 1, E), jnp.float32)

    def gradient(*arrays: Any) -> Any:
        return jax.grad(lambda *x: (mk.attention(*x, implementation=TILES) ** 2).sum(), argnums=(0, 1, 2))(*arrays)

    run = jax.jit(lambda arrays, along: jax.jvp(gradient, arrays, along))
    program = run.lower((array,) * 3, (array,) * 3).compile()
    assert largest_array(program) < length * length / 16
    assert program.memory_analysis().temp_size_in_bytes < length * length


def test_a_program_does_not_grow_with_the_number_of_heads_and_examples() -> None:
    """Where each of a hundred was written out, XLA took minutes to compile gates, groups or gradients of a bias."""

    def length_of_text(batch: int) -> int:
        shapes = {"query": (batch, 3, 4, E), "key": (batch, 3, 2, E), "slopes": (4,), "gate": (batch, 4)}

        def loss(x: dict[str, Any]) -> Any:
            options = {"bias": mk.AlibiBias(x["slopes"]), "head_gate": x["gate"], "implementation": mk.Blockwise()}
            return mk.attention(x["query"], x["key"], x["key"], **options).sum()

        arrays = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
        return len(jax.jit(jax.grad(loss)).lower(arrays).as_text())

    assert length_of_text(60) < 1.02 * length_of_text(6)


def test_the_gram_of_many_heads_holds_no_map() -> None:
    """At L = 8192 and 8 heads the maps would take 2 GiB."""
    length, heads = 8192, 8
    array = jax.ShapeDtypeStruct((1, length, heads, 64), jnp.float32)
    program = jax.jit(lambda q, k: mk.head_gram(q, k, mask=mk.CausalMask())).lower(array, array).compile()
    assert largest_array(program) <= length * heads * 64
    assert program.memory_analysis().temp_size_in_bytes < 2**27
