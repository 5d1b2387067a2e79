"""What a constructor refuses, as an error of the config."""

from collections.abc import Callable
from typing import Any

from mha_research.config import ConfigError


def as_config_error(path: str, make: Callable[[], Any]) -> Any:
    """What `make` gives; a setting that a constructor refuses is a ConfigError that names the group."""
    try:
        return make()
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        if type(error).__module__.startswith("mha_research"):  # TaskError says enough by itself
            raise
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
