"""`MultiHeadAttention` from the parameters of flax.nnx, flax.linen and PyTorch. None of these needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mha_research.attention import MultiHeadAttention
from mha_research.attention.arguments import as_array, check_integers, check_kinds

Arrays = Mapping[str, Any]
MADE_BY_PARAMETERS = {
    "in_features", "num_heads", "num_kv_heads", "key_features", "value_features", "head_dim", "value_head_dim",
    "out_features", "use_bias", "query_init", "key_init", "value_init", "output_init", "joint_init", "normalize_qk",
    "output_projection", "packed", "rngs",
}  # fmt: skip


def from_linen(parameters: Mapping[str, Arrays], **choices: Any) -> MultiHeadAttention:
    """A module with the output of flax.linen's `MultiHeadDotProductAttention` (or `MultiHeadAttention`) of these
    parameters.

    Args:
      parameters: its ``variables["params"]``: query, key, value with kernel (., H, E) and bias (H, E), out with kernel
        (H, E, D) and bias (D,); query_ln and key_ln with scale (E,) where it normalises.
      choices: any other argument of `MultiHeadAttention`, e.g. dropout_rate or implementation.

    Raises ValueError naming a parameter that is missing, unknown or of the wrong shape, or a choice that the parameters
    make; TypeError where there are no numbers.
    """
    check_kinds("from_linen", Mapping, parameters=parameters)
    parts = {"query", "key", "value", "out"}
    norms = {"query_ln", "key_ln"}
    normalised = norms if norms & set(parameters) else set()
    _check_names(set(parameters), parts | normalised, "from_linen")
    linears_and_norms: dict[str, Any] = dict(parameters)
    check_kinds("from_linen", Mapping, **linears_and_norms)
    for name in normalised:
        _check_names(set(parameters[name]), {"scale"}, f"from_linen: {name}")
    linears = {
        name: {key: jnp.asarray(as_array(f"from_linen: {key} of {name}", x)) for key, x in parameters[name].items()}
        for name in parts
    }
    for name, linear in linears.items():
        allowed = {"kernel", "bias"} if "bias" in linear else {"kernel"}
        _check_names(set(linear), allowed, f"from_linen: {name}")
    scales = {
        name.replace("_ln", "_norm"): jnp.asarray(as_array(f"from_linen: scale of {name}", parameters[name]["scale"]))
        for name in normalised
    }
    return _assemble("from_linen", linears, scales, choices)


def from_nnx(module: nnx.MultiHeadAttention, **choices: Any) -> MultiHeadAttention:
    """A module with the output of a `flax.nnx.MultiHeadAttention`, whose parameters are copied; see `from_linen`.

    Its rate of dropout, types and precision are taken over unless `choices` has others.
    """
    check_kinds("from_nnx", nnx.MultiHeadAttention, module=module)
    state = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    taken = {name: getattr(module, name) for name in ("dropout_rate", "dtype", "precision")}
    return from_linen(state, **{**taken, **choices})


def from_torch(tensors: Arrays, num_heads: int, *, prefix: str = "", **choices: Any) -> MultiHeadAttention:
    """A module with the output of a `torch.nn.MultiheadAttention` of these tensors (its state_dict, or a file's).

    PyTorch's masks say True = forbidden and are (L, S) or (B * H, L, S): negate them, and pass ``~key_padding_mask``.

    Args:
      tensors: names as in PyTorch after `prefix`: in_proj_weight (3 D, D), or q_proj_weight, k_proj_weight and
        v_proj_weight where key and value are of other widths; in_proj_bias (3 D,); bias_k and bias_v (1, 1, D);
        out_proj.weight, out_proj.bias. Anything that numpy can read, torch tensors on the CPU included.
      choices: other arguments of `MultiHeadAttention`; ``add_zero_attention=True`` for add_zero_attn, which no tensor
        shows.

    Raises ValueError naming a tensor that is missing, unknown or of the wrong shape, or when D is no multiple of
    num_heads.
    """
    check_kinds("from_torch", Mapping, tensors=tensors)
    check_integers("from_torch", num_heads=num_heads)
    found = {
        name.removeprefix(prefix): jnp.asarray(as_array(f"from_torch: {name}", np.asarray(x)))
        for name, x in tensors.items()
        if name.startswith(prefix)
    }
    packed = "in_proj_weight" in found
    weights = {"in_proj_weight"} if packed else {"q_proj_weight", "k_proj_weight", "v_proj_weight"}
    optional = {"in_proj_bias", "bias_k", "bias_v", "out_proj.bias"} & set(found)
    _check_names(set(found), weights | {"out_proj.weight"} | optional, "from_torch")
    if found["out_proj.weight"].ndim != 2:
        raise ValueError(f"from_torch: out_proj.weight must have rank 2, got {found['out_proj.weight'].shape}")
    width = found["out_proj.weight"].shape[0]
    _check_shape(found["out_proj.weight"], (width, width), "from_torch: out_proj.weight")
    if width % num_heads:
        raise ValueError(f"from_torch: width {width} is no multiple of num_heads={num_heads}")
    head = (num_heads, width // num_heads)
    if packed:
        _check_shape(found["in_proj_weight"], (3 * width, width), "from_torch: in_proj_weight")
        matrices = jnp.split(found["in_proj_weight"], 3)
    else:
        matrices = [found[f"{letter}_proj_weight"] for letter in "qkv"]
    linears: dict[str, dict[str, jax.Array]] = {}
    for name, shape in (("in_proj_bias", (3 * width,)), ("bias_k", (1, 1, width)), ("bias_v", (1, 1, width))):
        if name in found:
            _check_shape(found[name], shape, f"from_torch: {name}")
    biases = jnp.split(found["in_proj_bias"], 3) if "in_proj_bias" in found else [None] * 3
    for name, matrix, bias in zip(("query", "key", "value"), matrices, biases):
        _check_shape(matrix, (width, *matrix.shape[-1:]), f"from_torch: weight of {name}")
        linears[name] = {"kernel": matrix.T.reshape(matrix.shape[1], *head)}
        if bias is not None:
            linears[name]["bias"] = bias.reshape(head)
    linears["out"] = {"kernel": found["out_proj.weight"].T.reshape(*head, width)}
    if "out_proj.bias" in found:
        linears["out"]["bias"] = found["out_proj.bias"]
    extra = {}
    if ("bias_k" in found) != ("bias_v" in found):
        raise ValueError("from_torch: bias_k and bias_v come together, one is missing")
    if "bias_k" in found:
        choices = {**choices, "add_bias_kv": True}
        extra = {"bias_key": found["bias_k"].reshape(head), "bias_value": found["bias_v"].reshape(head)}
    return _assemble("from_torch", linears, extra, choices)


def read_safetensors(path: str | PathLike[str]) -> dict[str, jax.Array]:
    """Name to array of a safetensors file: no torch, nothing unpickled. bfloat16 stays bfloat16.

    Raises FileNotFoundError where there is no such file, ValueError where it is no safetensors file.
    """
    from safetensors import SafetensorError
    from safetensors.flax import load_file

    if not Path(path).is_file():
        raise FileNotFoundError(f"read_safetensors: there is no file {str(path)!r}")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"read_safetensors: {str(path)!r} is no safetensors file: {error}") from error


def _check_names(found: set[str], expected: set[str], where: str) -> None:
    if found != expected:
        raise ValueError(
            f"{where}: parameters missing: {sorted(expected - found)}, unknown: {sorted(found - expected)}"
        )


def _check_shape(array: jax.Array, shape: tuple[int, ...], where: str) -> None:
    if array.shape != shape:
        raise ValueError(f"{where} must be {shape}, got {array.shape}")


def _assemble(
    where: str, linears: dict[str, dict[str, jax.Array]], extra: dict[str, jax.Array], choices: dict[str, Any]
) -> MultiHeadAttention:
    """A module of the sizes that the kernels show, with these parameters in place of drawn ones."""
    if MADE_BY_PARAMETERS & set(choices):
        raise ValueError(f"{where}: the parameters decide on {sorted(MADE_BY_PARAMETERS & set(choices))}, not choices")
    dtype = jnp.result_type(*(array for linear in linears.values() for array in linear.values()), *extra.values())
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{where}: parameters have dtype {dtype}; expected floats")
    query, key, value, out = (linears[name]["kernel"] for name in ("query", "key", "value", "out"))
    for name, kernel in zip(("query", "key", "value", "out"), (query, key, value, out)):
        if kernel.ndim != 3:
            raise ValueError(f"{where}: kernel of {name} must have rank 3, got {kernel.shape}")
    zeros = jax.nn.initializers.zeros  # nothing is drawn, since everything is replaced
    module = MultiHeadAttention(
        query.shape[0], query.shape[1], key.shape[1], key.shape[0], value.shape[0], query.shape[2], value.shape[2],
        out.shape[2], "bias" in linears["query"], query_init=zeros, key_init=zeros, value_init=zeros, output_init=zeros,
        normalize_qk="query_norm" in extra, param_dtype=choices.pop("param_dtype", dtype), rngs=nnx.Rngs(0),
        **choices,
    )  # fmt: skip
    for name, ours in (("query", module.query), ("key", module.key), ("value", module.value), ("out", module.output)):
        for part in ("kernel", "bias"):
            target, given = getattr(ours, part), linears[name].get(part)
            if (target is None) != (given is None):
                raise ValueError(f"{where}: {part} of {name} is {'unknown' if target is None else 'missing'}")
            if target is not None:
                _replace(target, given, f"{where}: {part} of {name}")
    for name, array in extra.items():
        target = getattr(module, name)
        _replace(target.scale if name.endswith("_norm") else target, array, f"{where}: {name}")
    return module


def _replace(target: nnx.Param, given: Any, where: str) -> None:
    _check_shape(given, target.shape, where)
    target[...] = given.astype(target.dtype)
