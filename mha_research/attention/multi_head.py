"""Multi-head attention: projections around `mha_kernels.attention`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

import mha_kernels
from mha_kernels import Bias, CausalMask, Dropout, Mask, Origin
from mha_research.attention.kind import AllowedValues
from mha_research.attention import cache as caching
from mha_research.attention import initializers
from mha_research.attention.arguments import as_gate, check_inputs, check_kinds, check_numbers, check_rngs, one_key
from mha_research.attention.cache import DecodeCache
from mha_research.attention.drop_head import DropHead, HeadImportance
from mha_research.attention.layers.adapter import Adapter
from mha_research.attention.layers.bias_key import beside_bias_key, new_bias_key, with_bias_value
from mha_research.attention.layers.product import flat_dot_general
from mha_research.attention.layers.projection import PackedProjection
from mha_research.attention.options import (
    HeadOptions,
    as_mask,
    check_sizes,
    gated,
    join_biases,
    join_masks,
    scale_factor,
)
from mha_research.attention.positions.schemes import Position

XAVIER = initializers.xavier_uniform()


class MultiHeadAttention(nnx.Module):
    """head_h = softmax(scale Q_h K_g^T + bias) V_g with g = h // (H/G); output = sum_h head_h W_O,h + b. Vaswani et al.
    2017, section 3.2.

    Args:
      in_features: D, width of the query input and, unless given otherwise, of key and value input and output.
      num_heads: H.
      num_kv_heads: G, a divisor of H (H: multi-head; 1: multi-query, Shazeer 2019; else grouped-query, Ainslie et al.
        2023).
      key_features, value_features: widths of the key and value inputs.
      head_dim: E, free of D; D / H unless given. value_head_dim: V, E unless given.
      out_features: width of the output, D unless given.
      use_bias: biases on query, key, value and output projection, zero at the start.
      scale: "inverse_sqrt" (1/sqrt(E)), "inverse" (1/E, muP), "none" (1), or a number.
      softcap: c of c tanh(s / c), before biases.
      normalize_qk: LayerNorm with a trained scale on each head's query and key, before rotation (Dehghani et al. 2023,
        as in flax).
      sink: a trained logit a head that joins the softmax, zero at the start.
      position: None, `Alibi`, `RelativeBias`, `Rotary` or another `Position`.
      query_init, key_init, value_init, output_init: see `initializers`, on flat matrices; joint_init sets all four
        together (`mimetic`).
      output_projection: False leaves W_O out; the output is then the heads side by side, H*V wide.
      packed: query, key and value weights in one matrix, one product for self attention. The same start and the same
        gradients.
      dropout_rate: on the attention probabilities, in [0, 1).
      drop_head: a `DropHead`; adapter_features: width of a bottleneck adapter on the output (`Adapter`).
      gate_output: head outputs times sigmoid(query W_G), elementwise (Qiu et al. 2025).
      add_bias_kv: one more key and value, trained, that every query may attend; add_zero_attention: one more key of
        score 0 with value 0 (the softmax has 1 added to its denominator). Both as in PyTorch.
      dtype: type of the computation, from inputs and parameters unless given. param_dtype: type of the parameters.
      precision: of the matrix products. implementation: of the attention, see `mha_kernels.attention`.

    Raises ValueError for sizes that do not fit, a rate outside its range or an unknown scale, TypeError for a choice of
    another type.
    """

    allowed: tuple[AllowedValues, ...] = ()

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        key_features: int | None = None,
        value_features: int | None = None,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
        out_features: int | None = None,
        use_bias: bool = True,
        *,
        scale: Literal["inverse_sqrt", "inverse", "none"] | float = "inverse_sqrt",
        softcap: float | None = None,
        normalize_qk: bool = False,
        sink: bool = False,
        position: Position | None = None,
        query_init: initializers.Initializer = XAVIER,
        key_init: initializers.Initializer = XAVIER,
        value_init: initializers.Initializer = XAVIER,
        output_init: initializers.Initializer = XAVIER,
        joint_init: initializers.JointInitializer | None = None,
        output_projection: bool = True,
        packed: bool = False,
        dropout_rate: float = 0.0,
        drop_head: DropHead | None = None,
        adapter_features: int | None = None,
        gate_output: bool = False,
        add_bias_kv: bool = False,
        add_zero_attention: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        implementation: Any = "auto",
        rngs: nnx.Rngs,
    ):
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        name = type(self).__name__
        check_sizes(
            name, dropout_rate, in_features=in_features, num_heads=num_heads, num_kv_heads=num_kv_heads,
            key_features=key_features, value_features=value_features, head_dim=head_dim,
            value_head_dim=value_head_dim, out_features=out_features,
        )  # fmt: skip
        check_kinds(name, Position, optional=True, position=position)
        check_kinds(name, DropHead, optional=True, drop_head=drop_head)
        check_kinds(
            name, Callable, query_init=query_init, key_init=key_init, value_init=value_init, output_init=output_init
        )
        check_kinds(name, Callable, optional=True, joint_init=joint_init)
        check_rngs(name, rngs)
        if softcap is not None:
            check_numbers(name, positive=True, softcap=softcap)
        self.in_features, self.num_heads, self.num_kv_heads = in_features, num_heads, num_kv_heads
        self.key_features = in_features if key_features is None else key_features
        self.value_features = in_features if value_features is None else value_features
        self.head_dim = in_features // num_heads if head_dim is None else head_dim
        self.value_head_dim = self.head_dim if value_head_dim is None else value_head_dim
        self.out_features = in_features if out_features is None else out_features
        self.scale = scale_factor(scale, self.head_dim)
        self.softcap = None if softcap is None else float(softcap)
        self.position, self.dropout_rate, self.drop_head = position, float(dropout_rate), drop_head
        self.add_zero_attention, self.packed = add_zero_attention, packed
        self.dtype, self.param_dtype = dtype, param_dtype
        self.precision, self.implementation = precision, implementation
        self._check_widths(None if output_projection else out_features)

        types = {"dtype": dtype, "param_dtype": param_dtype, "precision": precision, "rngs": rngs}
        linear: Any = functools.partial(nnx.LinearGeneral, use_bias=use_bias, dot_general=flat_dot_general, **types)
        output_shape = (num_heads, self.value_head_dim)
        query = linear(in_features, (self._query_heads(), self.head_dim), kernel_init=query_init)
        key = linear(self.key_features, (self._key_heads(), self.head_dim), kernel_init=key_init)
        value = linear(self.value_features, (num_kv_heads, self.value_head_dim), kernel_init=value_init)
        output = linear(output_shape, self.out_features, axis=(-2, -1), kernel_init=output_init)
        if joint_init is not None:
            self._initialise_together(joint_init, rngs.params(), query=query, key=key, value=value, output=output)
        if packed:
            self.query_key_value = PackedProjection(query, key, value)
        else:
            self.query, self.key, self.value = query, key, value
        self.output = output if output_projection else None
        if not output_projection:
            self.out_features = math.prod(output_shape)

        norm = {"use_bias": False, "dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.query_norm = nnx.LayerNorm(self.head_dim, **norm) if normalize_qk else None
        self.key_norm = nnx.LayerNorm(self.head_dim, **norm) if normalize_qk else None
        self.sink = nnx.Param(jnp.zeros((num_heads,), param_dtype)) if sink else None
        trained = None if position is None else position.parameter(rngs.params(), num_heads, param_dtype)
        self.position_parameter = None if trained is None else nnx.Param(trained)
        self.gate = linear(in_features, output_shape, kernel_init=value_init) if gate_output else None
        self.bias_key = new_bias_key(rngs, num_kv_heads, self.head_dim, param_dtype) if add_bias_kv else None
        self.bias_value = new_bias_key(rngs, num_kv_heads, self.value_head_dim, param_dtype) if add_bias_kv else None
        self.adapter = None if adapter_features is None else Adapter(self.out_features, adapter_features, **types)
        weighted = drop_head is not None and drop_head.importance_power != 0
        self.head_importance = HeadImportance(jnp.ones((num_heads,), jnp.float32)) if weighted else None

    def _check_widths(self, unprojected: int | None) -> None:
        """unprojected: the width asked of an output without W_O."""
        if self.packed and not self.in_features == self.key_features == self.value_features:
            raise ValueError("MultiHeadAttention: packed needs query, key and value inputs of one width")
        if unprojected not in (None, self.num_heads * self.value_head_dim):
            raise ValueError(
                "MultiHeadAttention: without output_projection out_features is num_heads * value_head_dim = "
                f"{self.num_heads * self.value_head_dim}, got {unprojected}"
            )

    def _query_heads(self) -> int:
        """How many heads the query projection makes; a variant may share one."""
        return self.num_heads

    def _key_heads(self) -> int:
        return self.num_kv_heads

    def _initialise_together(
        self, joint_init: initializers.JointInitializer, rng: jax.Array, **targets: nnx.LinearGeneral
    ) -> None:
        widths = {self.in_features, self.key_features, self.value_features, self.out_features}
        if self.num_heads != self.num_kv_heads or len(widths) > 1:
            raise ValueError(
                "MultiHeadAttention: joint_init needs as many key/value heads as heads, and inputs and output of one "
                f"width; got {self.num_kv_heads} for {self.num_heads} heads and widths {sorted(widths)}"
            )
        sizes = (self.in_features, self.num_heads, self.head_dim, self.value_head_dim)
        matrices = joint_init(rng, *sizes, self.param_dtype)
        for name, linear in targets.items():
            linear.kernel[...] = matrices[name].reshape(linear.kernel.shape)

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array | None = None,
        value: jax.Array | None = None,
        *,
        mask: Mask | jax.Array | None = None,
        bias: Bias | jax.Array | None = None,
        key_padding_mask: jax.Array | None = None,
        head_gate: jax.Array | None = None,
        deterministic: bool = True,
        rngs: nnx.Rngs | jax.Array | None = None,
        step: int | jax.Array | None = None,
        return_weights: bool | Literal["average"] = False,
    ) -> Any:
        """Attend from query (B, Q, D) to key and value (B, K, .); gives (B, Q, out_features).

        Args:
          key: the query unless given. value: the key unless given.
          mask: True = may attend: an array (Q, K) or (B|1, H|1, Q, K), or masks of `mha_kernels`. bias: added to the
            scores, never scaled.
          key_padding_mask: (B, K) boolean, True = a real token.
          head_gate: (H,) or (B, H), times each head's output; a head at zero does no work.
          deterministic: False turns on dropout and DropHead, which then need `rngs` (an `nnx.Rngs` or a jax key) and,
            for a scheduled DropHead, `step`.
          return_weights: True adds the probabilities (B, H, Q, K), "average" their mean over heads (B, Q, K), before
            dropout and gates. The output is the same; the probabilities are dense, O(Q K). Mass on a sink, a bias key
            or the zero key is not among them.

        Raises ValueError or TypeError for shapes and types that do not fit, naming the argument.
        """
        if not isinstance(return_weights, bool) and return_weights != "average":
            raise ValueError(f"MultiHeadAttention: return_weights must be a bool or 'average', got {return_weights!r}")
        query, key, value = self._check_inputs(query, key, value)
        heads = self.project(query, key, value)
        options = self.options(
            query.shape[0],
            mask=mask,
            bias=bias,
            key_padding_mask=key_padding_mask,
            head_gate=head_gate,
            deterministic=deterministic,
            rngs=rngs,
            step=step,
        )
        output = self.combine(self.attend(*heads, options), query)
        if not return_weights:
            return output
        weights = self.weights(*heads, options)
        return output, jnp.mean(weights, axis=1) if return_weights == "average" else weights

    def _check_inputs(
        self, query: jax.Array, key: jax.Array | None, value: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        widths = (self.in_features, self.key_features, self.value_features)
        return check_inputs(type(self).__name__, widths, query, key, value)

    def project(
        self, query: jax.Array, key: jax.Array, value: jax.Array, start: int | jax.Array = 0
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Query (B, Q, H, E), key (B, K, G, E) and value (B, K, G, V) heads, normalised and rotated; position `start`
        comes first.
        """
        if self.packed:
            query, key, value = self.query_key_value(query, key, value)
        else:
            query, key, value = self.query(query), self.key(key), self.value(value)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        return self._rotate(query, start), self._rotate(key, start), value

    def _rotate(self, x: jax.Array, start: int | jax.Array) -> jax.Array:
        return x if self.position is None else self.position.rotate(x, start + jnp.arange(x.shape[1]))

    def options(
        self,
        batch_size: int,
        *,
        mask: Mask | jax.Array | None = None,
        bias: Bias | jax.Array | None = None,
        key_padding_mask: jax.Array | None = None,
        head_gate: jax.Array | None = None,
        deterministic: bool = True,
        rngs: nnx.Rngs | jax.Array | None = None,
        step: int | jax.Array | None = None,
        origin: Origin | None = None,
    ) -> HeadOptions:
        """A call's arguments in the form that `mha_kernels` takes, with the module's own bias, dropout and DropHead."""
        if not isinstance(deterministic, bool):
            raise TypeError(f"MultiHeadAttention: deterministic must be a bool, got {deterministic!r}")
        head_gate = as_gate(head_gate, batch_size, self.num_heads)
        wide = jnp.promote_types(self.dtype or self.param_dtype, jnp.float32)
        own = None
        if self.position is not None:
            trained = None if self.position_parameter is None else self.position_parameter[...]
            own = self.position.bias(trained, self.num_heads, wide)
        dropout = None
        if not deterministic and (self.dropout_rate or self.drop_head is not None):
            probability_key, head_key = jax.random.split(one_key("dropout or DropHead with deterministic=False", rngs))
            dropout = Dropout(self.dropout_rate, probability_key) if self.dropout_rate else None
            if self.drop_head is not None:
                importance = None if self.head_importance is None else self.head_importance[...]
                gates = self.drop_head.gates(
                    head_key, batch_size, self.num_heads, step=step, importance=importance, dtype=wide
                )
                head_gate = gates if head_gate is None else gates * head_gate
        masks, biases = join_masks(mask, key_padding_mask), join_biases(bias, own)
        return HeadOptions(masks, biases, head_gate, dropout, origin or Origin(), step)

    def attend(self, query: jax.Array, key: jax.Array, value: jax.Array, options: HeadOptions) -> jax.Array:
        """Head outputs (B, Q, H, V) of projected heads. What a variant of the attention itself overrides."""
        call = {"dropout": options.dropout, "precision": self.precision, "implementation": self.implementation}
        call = {**self.scoring(options), **call, "origin": options.origin}
        if self.bias_key is None or self.bias_value is None:
            return mha_kernels.attention(query, key, value, head_gate=options.head_gate, **call)
        heads, share = beside_bias_key(query, key, value, self.bias_key[...], call)
        return gated(with_bias_value(heads, share, self.bias_value[...], options.dropout), options.head_gate)

    def weights(self, query: jax.Array, key: jax.Array, value: jax.Array, options: HeadOptions) -> jax.Array:
        """Probabilities (B, H, Q, K) before dropout and gates."""
        weights = mha_kernels.attention_weights(query, key, **self.scoring(options))
        if self.bias_key is None:
            return weights
        return weights * beside_bias_key(query, key, value, self.bias_key[...], self.scoring(options))[1][..., None]

    def scoring(self, options: HeadOptions) -> dict[str, Any]:
        """Everything that decides the probabilities of projected heads, as arguments of `mha_kernels`."""
        return {
            "mask": options.mask,
            "bias": options.bias,
            "scale": self.scale,
            "softcap": self.softcap,
            "sink": self._sink(),
        }

    def _sink(self) -> jax.Array | None:
        # A key of score 0 and value 0 is a sink with logit 0; beside a trained one: log(1 + exp(sink)).
        if self.sink is None:
            return jnp.zeros((self.num_heads,), jnp.float32) if self.add_zero_attention else None
        sink = self.sink[...]
        return jax.nn.softplus(sink) if self.add_zero_attention else sink

    def combine(self, heads: jax.Array, query: jax.Array) -> jax.Array:
        """(B, Q, out_features) from head outputs (B, Q, H, V): gate, output projection, adapter."""
        if self.gate is not None:
            heads = heads * jax.nn.sigmoid(self.gate(query))
        output = heads.reshape(*heads.shape[:2], -1) if self.output is None else self.output(heads)
        return output if self.adapter is None else self.adapter(output)

    def kernels(self) -> dict[str, jax.Array]:
        """The weights by head, however they are stored: query (D, H, E), key (., G, E), value (., G, V) and output (H,
        V, out_features).
        """
        projections = () if self.packed else (self.query, self.key, self.value)
        parts = self.query_key_value.kernels() if self.packed else [p.kernel[...] for p in projections]
        kernels = dict(zip(("query", "key", "value"), parts))
        return kernels if self.output is None else {**kernels, "output": self.output.kernel[...]}

    def init_cache(self, batch_size: int, capacity: int, dtype: Any = None) -> DecodeCache:
        """An empty cache for `decode`, G heads wide; its type is the module's `dtype` (or `param_dtype`) unless
        given.
        """
        dtype = self.dtype or self.param_dtype if dtype is None else dtype
        key_shape, value_shape = (self._key_heads(), self.head_dim), (self.num_kv_heads, self.value_head_dim)
        return caching.init_cache(batch_size, capacity, key_shape, value_shape, dtype)

    def decode(
        self,
        tokens: jax.Array,
        cache: DecodeCache,
        key_padding_mask: jax.Array | None = None,
        *,
        mask: Mask | jax.Array | None = None,
        bias: Bias | jax.Array | None = None,
        head_gate: jax.Array | None = None,
    ) -> tuple[jax.Array, DecodeCache]:
        """Causal self attention of T more tokens (B, T, D) over everything in the cache: (B, T, out_features) and the
        new cache.

        Positions come from the cache index, so masks and biases of `mha_kernels` (a window, say) see absolute ones;
        arrays cover the whole capacity, (B|1, H|1, T, C). `key_padding_mask` (B, T) True = real is remembered. Raises
        ValueError when the cache is full; under jit, where that cannot be seen, the output is NaN from there on. Donate
        the cache to a jitted step, or each token copies it.
        """
        tokens, _, _ = self._check_inputs(tokens, None, None)
        check_kinds(type(self).__name__, DecodeCache, cache=cache)
        start = cache.index
        query, key, value = self.project(tokens, tokens, tokens, start)
        cache = cache.append(key, value, key_padding_mask)
        options = self.options(
            tokens.shape[0],
            mask=CausalMask() if mask is None else CausalMask() & as_mask(mask),
            bias=bias,
            key_padding_mask=cache.keep,
            head_gate=head_gate,
            origin=Origin(query=start),
        )
        output = self.combine(self.attend(query, cache.key, cache.value, options), tokens)
        return jnp.where(cache.overflowed, jnp.nan, output), cache
