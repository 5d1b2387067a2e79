"""What a sweep planned: `manifest.json`, one line a run, and what of it was frozen when it started.

Frozen are the claims, the seeds, the tuning grid, the worst values and the deterministic metrics; their hash names
them. What is added later is kept apart and labelled exploratory. The file is plain JSON, so any engine can run its
lines: `python -m experiments.sweep --workdir=DIR --run=NAME` is one run, and may be repeated.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from mha_research.analysis.statistics.claims import AllOf, Claim, claim_from_json, claim_to_json

FILE = "manifest.json"
Phase = Literal["tune", "main"]


class ManifestError(ValueError):
    """A sweep directory holds no manifest, or one that cannot be read. The message is one line."""


def plain(value: Any) -> Any:
    """Give a value the one form that it also has after its trip through JSON.

    JSON knows no tuple, and what was planned is compared with what was read, so sequences are tuples on both sides.

    Args:
        value: numbers, text, None, and mappings and sequences of them, nested.

    Returns:
        The same with every mapping a dict and every sequence a tuple.
    """
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return tuple(map(plain, value)) if isinstance(value, (list, tuple)) else value


class _Plain:
    """A frozen dataclass whose fields are stored as `plain` gives them."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            object.__setattr__(self, field.name, plain(getattr(self, field.name)))


@dataclasses.dataclass(frozen=True)
class PlannedRun(_Plain):
    """One run: the arm's config with these overrides, in the folder `runs/name`. Added after the start: exploratory."""

    name: str
    arm: str
    seed: int
    phase: Phase
    overrides: Mapping[str, Any]
    exploratory: bool = False

    def folder(self, workdir: Path) -> Path:
        return workdir / "runs" / self.name


@dataclasses.dataclass(frozen=True)
class Question(_Plain):
    """What is asked of the arms, and by which replicates: the part of a sweep that is frozen."""

    claims: Sequence[Claim | AllOf]
    seeds: Sequence[int]
    tune: Mapping[str, Any] | None = None
    worst: Mapping[str, float] = dataclasses.field(default_factory=dict)
    deterministic: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return fields | {"claims": [claim_to_json(claim) for claim in self.claims]}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Question":
        return Question(**{**data, "claims": [claim_from_json(claim) for claim in data["claims"]]})

    @property
    def hash(self) -> str:
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Manifest(_Plain):
    """A planned sweep. `later` are claims and seeds that were added or changed after `frozen` was fixed; `options` are
    those of the command line that changed the file's base: `--config.FIELD=VALUE`, `--quick`."""

    title: str
    config_file: str
    base: Mapping[str, Any]
    arms: Mapping[str, Mapping[str, Any]]
    frozen: Question
    runs: Sequence[PlannedRun]
    later: Question | None = None
    options: Sequence[str] = ()

    def to_text(self) -> str:
        head = {
            "title": self.title,
            "config_file": self.config_file,
            "options": list(self.options),
            "hash": self.frozen.hash,
            "frozen": self.frozen.to_json(),
            "later": self.later.to_json() if self.later else None,
            "arms": self.arms,
            "base": self.base,
        }
        lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
        runs = ",\n".join(json.dumps(dataclasses.asdict(run)) for run in self.runs)
        return "{\n" + ",\n".join(lines) + ',\n"runs": [\n' + runs + "\n]\n}\n"

    @staticmethod
    def read(workdir: Path) -> "Manifest":
        """The manifest of a sweep directory. Raises ManifestError if there is none, or it was damaged or changed by
        hand."""
        path = Path(workdir) / FILE
        try:
            data = json.loads(path.read_text(encoding="utf8"))
            frozen, later = Question.from_json(data["frozen"]), data["later"]
            runs = [PlannedRun(**run) for run in data["runs"]]
            manifest = Manifest(
                data["title"],
                data["config_file"],
                data["base"],
                data["arms"],
                frozen,
                runs,
                Question.from_json(later) if later else None,
                data["options"],
            )
            if data["hash"] != frozen.hash:
                raise ManifestError(
                    f"{path} was changed: its claims, seeds or tuning do not have the hash {data['hash']}"
                )
            manifest.check_runs(Path(workdir))
        except FileNotFoundError:
            raise ManifestError(f"{workdir} is no sweep: it holds no {FILE}") from None
        except ManifestError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ManifestError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
        return manifest

    def check_runs(self, workdir: Path) -> None:
        """Raises ManifestError for a run that is planned twice, outside the directory, or not what its arm and seed
        say."""
        path, root = workdir / FILE, (workdir / "runs").resolve()
        names = set()
        for run in self.runs:
            folder = run.folder(workdir).resolve()
            if not folder.is_relative_to(root) or folder == root:
                raise ManifestError(f"{path} names a run outside its directory: {run.name!r}")
            if run.name in names:
                raise ManifestError(f"{path} names the run {run.name!r} twice")
            names.add(run.name)
            settings = {**self.arms[run.arm], "seed": run.seed}
            if run.phase == "tune" and self.frozen.tune:
                settings[self.frozen.tune["field"]] = run.overrides[self.frozen.tune["field"]]
            if settings != dict(run.overrides):
                raise ManifestError(f"{path} was changed: the run {run.name!r} is not that of its arm and seed")
