"""Research on multi-head attention in JAX: modules, experiments, ablations, diagnostics."""
