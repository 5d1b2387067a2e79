"""The config tree: one documented default, typed overrides, choices, saved configs, provenance."""

from mha_research.config.default import FIELDS, SCHEMA, default_config
from mha_research.config.load import build_choice, load_config, load_module, override, parse_arguments
from mha_research.config.provenance import provenance, records
from mha_research.config.schema import ConfigError
from mha_research.config.tree import differences, flat, from_json, from_values, to_json, validate, within_bounds

__all__ = [
    "FIELDS",
    "SCHEMA",
    "ConfigError",
    "build_choice",
    "default_config",
    "differences",
    "flat",
    "from_json",
    "from_values",
    "load_config",
    "load_module",
    "override",
    "parse_arguments",
    "provenance",
    "records",
    "to_json",
    "validate",
    "within_bounds",
]
