"""Every row of the tables in docs/modules.md: parameters and multiplications beside plain attention, counted."""

import re
from math import prod

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import mha_research
from mha_research import Alibi, MultiHeadAttention, RelativeBias, Rotary
from tests.documents import ROOT

SIZES = {"D": 24, "H": 4, "E": 6, "L": 10, "G": 2, "k": 3, "m": 16, "n": 3, "w": 5, "N": 8, "S": 16}
SCHEMES = {"Alibi": Alibi, "Rotary": Rotary, "RelativeBias": RelativeBias}
ROW = re.compile(r"^\| (\w+) \| (?:`(.*?)`)? ?\| `(.*?)` \| `(.*?)` \|", re.MULTILINE)
ROWS = ROW.findall((ROOT / "docs/modules.md").read_text())


def value(formula):
    return eval(formula, {}, SIZES)


def make(name, choices=""):
    return eval(
        f"kind(D, H, {choices}{', ' if choices else ''}rngs=rngs, implementation='reference')",
        {"kind": getattr(mha_research, name), "rngs": nnx.Rngs(0), **SCHEMES},
        SIZES,
    )


def parameters(module):
    return sum(x.size for x in jax.tree.leaves(nnx.state(module, nnx.Param)))


def products(jaxpr):
    """Multiplications of the matrix products and convolutions of a jaxpr, those of inner ones included."""
    total = 0
    for equation in jaxpr.eqns:
        inputs, (output, *_) = [v.aval for v in equation.invars], [v.aval for v in equation.outvars]
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            total += output.size * prod(inputs[0].shape[axis] for axis in contracted)
        elif equation.primitive.name == "conv_general_dilated":
            out_axis = equation.params["dimension_numbers"].rhs_spec[0]
            total += output.size * inputs[1].size // inputs[1].shape[out_axis]
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                total += equation.params.get("length", 1) * products(inner)
    return total


def multiplications(module):
    x = jnp.zeros((1, SIZES["L"], SIZES["D"]))
    call = {"domain": jnp.zeros(1, int)} if isinstance(module, mha_research.DomainAdapter) else {}
    return products(jax.make_jaxpr(lambda x: module(x, **call))(x).jaxpr)


def test_plain_attention_costs_what_the_page_says_whatever_the_number_of_heads():
    for heads in (1, 2, 4, 8, 24):
        module = MultiHeadAttention(SIZES["D"], heads, implementation="reference", rngs=nnx.Rngs(0))
        assert parameters(module) == value("4*D*D + 4*D")
        assert multiplications(module) == value("4*L*D*D + 2*L*L*D")


def test_the_page_has_every_variant():
    named = {name for name, *_ in ROWS}
    assert len(ROWS) >= 23
    assert {name for name in mha_research.attention.__all__ if name.endswith("Attention")} <= named


@pytest.mark.parametrize("name, choices, extra_parameters, extra_multiplications", ROWS)
def test_a_row_of_the_page(name, choices, extra_parameters, extra_multiplications):
    plain, module = make("MultiHeadAttention"), make(name, choices)
    assert parameters(module) - parameters(plain) == value(extra_parameters)
    assert multiplications(module) - multiplications(plain) == value(extra_multiplications)
