"""Research on multi-head attention in JAX: modules, experiments, ablations, and their statistics.

Everything that `mha_research.attention` exports (`MultiHeadAttention`, `Alibi`, `DropHead`, `initializers`, ...) and
every subpackage is an attribute here, imported when first asked for: `import mha_research` itself costs nothing.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mha_research.attention import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if find_spec(f"{__name__}.{name}"):
        return import_module(f"{__name__}.{name}")
    attention = import_module(f"{__name__}.attention")
    if name not in attention.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(attention, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *import_module(f"{__name__}.attention").__all__})
