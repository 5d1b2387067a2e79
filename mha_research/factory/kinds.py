"""Settings that do not go with the chosen kind of attention, as the kind says."""

from ml_collections import ConfigDict

from mha_research.config import SCHEMA, ConfigError, flat
from mha_research.config.doors import chosen
from mha_research.config.sources import portable


def check_kind(config: ConfigDict) -> None:
    """ConfigError, which names the field and what it must be, for a setting that does not go with the kind.

    A class lists them as `allowed` (see `mha_research.attention.kind`).
    """
    attention, _ = chosen(SCHEMA, config, "model.attention")
    task, fields = chosen(SCHEMA, config, "task")
    values = flat(config)
    values["task.ordered"] = getattr(task, "ordered", True)
    values["task.segments"] = getattr(task, "packs_documents", False) and fields.get("segments", True)
    for allowed in getattr(attention, "allowed", ()):
        if values[allowed.field] not in allowed.values:
            wanted = " or ".join(map(repr, allowed.values))
            kind = portable(config.model.attention.kind)
            raise ConfigError(
                f"{allowed.field} must be {wanted} with model.attention.kind = {kind!r}, got "
                f"{values[allowed.field]!r}: {allowed.reason}"
            )
