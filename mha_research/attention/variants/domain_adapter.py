"""A gated shift of the output by domain."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mha_research.attention.arguments import as_array, check_integers
from mha_research.attention.cache import DecodeCache
from mha_research.attention.multi_head import MultiHeadAttention


class DomainAdapter(MultiHeadAttention):
    """y + sigmoid(y W_G + b) * e_d, y plain attention, e_d a vector of the example's domain. After Houlsby et al. 2019.

    `domain` in the call is (B,) integers or (B, num_domains) weights of a mixture; without it the module is plain
    attention. The vectors are zero at the start, so no domain changes anything then. With O the output width,
    O^2 + O + num_domains O more parameters.
    """

    def __init__(self, in_features: int, num_heads: int, *sizes: Any, num_domains: int, rngs: nnx.Rngs, **choices: Any):
        check_integers("DomainAdapter", num_domains=num_domains)
        super().__init__(in_features, num_heads, *sizes, rngs=rngs, **choices)
        types: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.param_dtype, "precision": self.precision}
        self.domain_gate = nnx.Linear(
            self.out_features, self.out_features, kernel_init=jax.nn.initializers.xavier_uniform(), rngs=rngs, **types
        )
        self.domains = nnx.Param(jnp.zeros((num_domains, self.out_features), self.param_dtype))

    def __call__(self, query: jax.Array, *inputs: Any, domain: jax.Array | None = None, **call: Any) -> Any:
        """As `MultiHeadAttention`, with the domain of each example. Raises ValueError or TypeError where it does not
        fit.
        """
        result = super().__call__(query, *inputs, **call)
        if isinstance(result, tuple):
            return self._shifted(result[0], domain), *result[1:]
        return self._shifted(result, domain)

    def decode(
        self, tokens: jax.Array, cache: DecodeCache, *arguments: Any, domain: jax.Array | None = None, **options: Any
    ) -> tuple[jax.Array, DecodeCache]:
        """As `MultiHeadAttention.decode`, with the domain of each example."""
        output, cache = super().decode(tokens, cache, *arguments, **options)
        return self._shifted(output, domain), cache

    def _shifted(self, output: jax.Array, domain: jax.Array | None) -> jax.Array:
        if domain is None:
            return output
        domain = jnp.asarray(as_array("DomainAdapter: domain", domain))
        shift = self._vectors(domain, output.shape[0]).astype(output.dtype)[:, None]
        return output + jax.nn.sigmoid(self.domain_gate(output)) * shift

    def _vectors(self, domain: jax.Array, batch_size: int) -> jax.Array:
        count = self.domains.shape[0]
        if domain.shape not in ((batch_size,), (batch_size, count)):
            raise ValueError(
                f"DomainAdapter: domain must be {(batch_size,)} or {(batch_size, count)}, got {domain.shape}"
            )
        if domain.ndim == 1:
            if not jnp.issubdtype(domain.dtype, jnp.integer):
                raise TypeError(f"DomainAdapter: domain (B,) must be integers, got {domain.dtype}")
            if not isinstance(domain, jax.core.Tracer) and not np.isin(np.asarray(domain), range(count)).all():
                raise ValueError(f"DomainAdapter: domain must be in [0, {count}), got {domain}")
            domain = jax.nn.one_hot(domain, count, dtype=self.domains.dtype)
        return domain @ self.domains[...]
