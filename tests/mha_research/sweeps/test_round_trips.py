"""What a sweep, a run or a config keeps compares equal with what is read back, whatever the values are."""

import dataclasses
import json
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from mha_research.analysis.manifest import FILE, Manifest, PlannedRun, Question
from mha_research.analysis.statistics.claims import AllOf, Claim, claim_from_json, claim_to_json
from mha_research.config import FIELDS, default_config, from_json, override, to_json
from mha_research.run_dir import Result, read_result
from mha_research.run_dir.files import append_row, read_rows

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
NAMES = TEXT.filter(bool)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**40), 2**40)
SCALARS = st.none() | st.booleans() | NUMBERS | TEXT
# Lists and tuples, nested, with scalars: what a config field may hold, and more.
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner), max_leaves=5)
SETTINGS = st.dictionaries(NAMES, VALUES, max_size=3)
CLAIMS = st.builds(
    lambda text, metric, weight, kind, margin, scale: Claim(
        text=text, metric=metric, contrast={"a": weight, "b": -weight}, kind=kind, margin=margin, scale=scale
    ),
    *(NAMES, NAMES, st.floats(0.01, 100) | st.integers(1, 5)),
    *(st.sampled_from(["greater", "within"]), st.floats(0.001, 9), st.sampled_from(["difference", "log_ratio"])),
)
ASKED = st.lists(CLAIMS | st.builds(AllOf, st.lists(CLAIMS, min_size=2, max_size=3), TEXT, TEXT), max_size=3)
SEEDS = st.lists(st.integers(0, 2**31 - 1), unique=True, min_size=1, max_size=3)
TUNES = st.none() | st.fixed_dictionaries({"field": NAMES, "values": st.lists(VALUES, min_size=2), "seeds": SEEDS})
QUESTIONS = st.builds(
    Question, ASKED, SEEDS, TUNES, st.dictionaries(NAMES, NUMBERS, max_size=2), st.lists(NAMES, max_size=2)
)


@st.composite
def manifests(draw):
    arms = {arm: draw(SETTINGS) for arm in ("a", "b")}
    question = draw(QUESTIONS)
    # A tuning run also has a value of the grid; those of a real plan are in test_tuned_sweeps.py.
    runs = [
        PlannedRun(f"{arm}/seed{seed}", arm, seed, "main", {**changes, "seed": seed}, draw(st.booleans()))
        for arm, changes in arms.items()
        for seed in question.seeds
    ]
    later = draw(st.none() | QUESTIONS)
    options = draw(st.lists(TEXT, max_size=2))
    return Manifest(draw(TEXT), draw(TEXT), draw(SETTINGS), arms, question, runs, later, options)


@given(manifests())
def test_a_manifest(manifest):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, FILE).write_text(manifest.to_text(), encoding="utf8")
        again = Manifest.read(Path(folder))
    assert again == manifest
    assert again.frozen.hash == manifest.frozen.hash
    assert again.to_text() == manifest.to_text()


@given(CLAIMS | st.builds(AllOf, st.lists(CLAIMS, min_size=2, max_size=3), TEXT, TEXT))
def test_a_claim(claim):
    assert claim_from_json(json.loads(json.dumps(claim_to_json(claim)))) == claim


@given(QUESTIONS)
def test_a_question_and_its_hash(question):
    again = Question.from_json(json.loads(json.dumps(question.to_json())))
    assert again == question
    assert again.hash == question.hash


@given(SETTINGS)
def test_a_planned_run(overrides):
    run = PlannedRun("a/seed0", "a", 0, "main", overrides)
    assert PlannedRun(**json.loads(json.dumps(dataclasses.asdict(run)))) == run


@given(st.dictionaries(NAMES, st.floats(allow_nan=False), max_size=3), TEXT)
def test_a_result(metrics, message):
    result = Result("finished", 8, metrics, 10, 20, 30, 1.5, 7, 2, message)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "result.json").write_text(result.to_json(), encoding="utf8")
        assert read_result(Path(folder)) == result


@given(st.lists(st.dictionaries(NAMES, SCALARS, max_size=3), max_size=3))
def test_rows_of_metrics(rows):
    rows = [{"step": number, **row} for number, row in enumerate(rows) if "step" not in row]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "metrics.jsonl")
        for row in rows:
            append_row(path, row)
        assert read_rows(path) == rows


def _value(field):
    numbers = {int: st.integers(-(2**30), 2**30), float: st.floats(-1e30, 1e30)}
    one = {bool: st.booleans(), str: NAMES, **numbers}[field.type]
    return st.lists(one, max_size=3) | st.lists(one, max_size=3).map(tuple) if field.sequence else one


# A selector decides which other fields may be set, so those of the default are left as they are.
FREE = {path: field for path, field in FIELDS.items() if not field.values and not field.optional}
FREE |= {path: field for path, field in FIELDS.items() if path in ("task.test_lengths", "task.files")}


@given(st.fixed_dictionaries({}, optional={path: _value(field) for path, field in FREE.items()}))
def test_a_config(changes):
    config = override(default_config(), {})
    with config.unlocked():
        for path, value in changes.items():
            config.update_from_flattened_dict({path: tuple(value) if isinstance(value, list) else value})
    again = from_json(to_json(config))
    assert again.to_dict() == config.to_dict()
