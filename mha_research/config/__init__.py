"""The config tree: one documented default, typed overrides, choices, doors, saved configs, provenance."""

from mha_research.config.default import SCHEMA, builtin_fields, default_config, known_fields, use
from mha_research.config.load import changed, load_config, load_module, override, parse_arguments
from mha_research.config.provenance import provenance, records
from mha_research.config.schema import ConfigError
from mha_research.config.tree import (
    differences,
    flat,
    from_json,
    from_values,
    named_outside,
    portable,
    read_values,
    saved_differences,
    to_json,
    trust_kept,
    validate,
    within_bounds,
)

__all__ = [
    "SCHEMA",
    "ConfigError",
    "builtin_fields",
    "changed",
    "default_config",
    "differences",
    "flat",
    "from_json",
    "from_values",
    "known_fields",
    "load_config",
    "load_module",
    "named_outside",
    "override",
    "parse_arguments",
    "portable",
    "provenance",
    "read_values",
    "records",
    "saved_differences",
    "to_json",
    "trust_kept",
    "use",
    "validate",
    "within_bounds",
]
