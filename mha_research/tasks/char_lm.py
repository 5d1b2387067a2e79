"""Predict the next character of real text, every held-out character exactly once."""

import bz2
import math
from collections.abc import Mapping
from functools import cached_property, partial
from typing import Annotated

import grain
import numpy as np

from mha_research.tasks.corpus import SPLITS, Corpus, counted, sotu, user_files
from mha_research.tasks.task import Evaluation, Example, Task, TaskSpec, random_batches

BOUNDARY, UNKNOWN, FIRST_CHARACTER = 0, 1, 2


class Vocabulary:
    """The characters of the training text by code point; 0 begins a document, 1 stands for every other character."""

    def __init__(self, text: str) -> None:
        self.characters = "".join(sorted(set(text)))
        self.size = len(self.characters) + FIRST_CHARACTER
        # Text in all the scripts of the world has more characters than 16 bits count.
        self._table = np.full(0x110000, UNKNOWN, np.uint16 if self.size <= 2**16 else np.uint32)
        self._table[_codepoints(self.characters)] = np.arange(FIRST_CHARACTER, self.size)

    def encode(self, text: str) -> np.ndarray:
        """Token of each character, uint16, or uint32 where there are more."""
        return self._table[_codepoints(text)]

    def decode(self, tokens: np.ndarray) -> str:
        """Text of tokens; unknown characters become U+FFFD and document boundaries a form feed."""
        return "".join(["\f", "\ufffd", *self.characters][token] for token in np.asarray(tokens).tolist())


def _codepoints(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


class Stream:
    """Documents one after the other, each begun by BOUNDARY; a window is L tokens and the L that follow them.

    The stream of documents x, y is `B x1 x2 ... B y1 y2 ...`. Each character is the target of the token before it, and
    a boundary is never a target.
    """

    def __init__(self, documents: list[np.ndarray], segments: bool) -> None:
        boundary = np.array([BOUNDARY], np.uint16)
        self.tokens = np.concatenate([part for document in documents for part in (boundary, document)])
        self.starts = np.cumsum([0, *(len(document) + 1 for document in documents)])[:-1]
        self.segments = segments

    def window(self, start: int, length: int, context: int = 0) -> Example:
        """L tokens from `start` with their targets; the first `context` targets and all beyond the end do not count."""
        piece = np.full(length + 1, BOUNDARY, np.int32)
        real = self.tokens[start : start + length + 1]
        piece[: len(real)] = real
        mask = piece[1:] != BOUNDARY
        mask[:context] = False
        example = {"tokens": piece[:-1], "targets": piece[1:], "mask": mask}
        if self.segments:
            first, last = np.searchsorted(self.starts, (start, start + length - 1), side="right")
            index = np.arange(length, dtype=np.int32)
            document, begin = np.full(length, first, np.int32), np.zeros(length, np.int32)
            for number, at in enumerate(self.starts[first:last] - start, first + 1):
                document[at:], begin[at:] = number, at
            example |= {"segments": document, "positions": index - begin}
        return example

    def evaluation(self, length: int, context: int) -> Evaluation:
        """Windows that make every character a counted target once, each but the first with `context` tokens before."""
        stride = length - context
        size = 1 + max(0, math.ceil((len(self.tokens) - 1 - length) / stride))
        return Evaluation(size, partial(_evaluation_window, self, length, context), len(self.starts))


def _evaluation_window(stream: Stream, length: int, context: int, index: int) -> Example:
    start = index * (length - context)
    document = np.searchsorted(stream.starts, np.arange(start, start + length), side="right") - 1
    window = stream.window(start, length, context if index else 0)
    return window | {"document": document.astype(np.int32)}


def _training_window(stream: Stream, length: int, recency: float, _: int, rng: np.random.Generator) -> Example:
    starts = max(1, len(stream.tokens) - length)
    start = rng.integers(starts) if recency == 1 else starts * rng.random() ** (1 / recency)
    return stream.window(int(start), length)


class CharLM(Task):
    """Character language modelling on the sotu speeches, or on the user's own files.

    Losses are nats per character, characters of held-out text that training never saw included: they are all the class
    UNKNOWN.
    With `context`, no counted character but those of the first window has a shorter past than that. Recency r draws
    training windows with density r (x / n)^(r - 1) at character x of n, for text that is held out by time.

    Args:
        length: tokens of one example
        files: glob of the user's own UTF-8 text files; the speeches of the sotu package unless given
        split_by: how `files` are held out, document or position (document where there are 3 or more)
        valid_fraction: share of the characters of `files` held out for validation (0.1)
        test_fraction: share of the characters of `files` held out for the test (0.1)
        context: leading tokens of an evaluation window that only give context, counted in the window before
        segments: documents packed into one window do not attend to each other
        test_lengths: further window lengths at which the test text is scored, test/...@N
        recency: how often the end of the training text is drawn, times the average
    """

    packs_documents = True

    def __init__(
        self,
        length: int = 128,
        files: str | None = None,
        split_by: str | None = None,
        valid_fraction: float | None = None,
        test_fraction: float | None = None,
        context: int = 0,
        segments: bool = True,
        test_lengths: tuple[int, ...] = (),
        recency: Annotated[float, "(0, inf)"] = 1.0,
    ) -> None:
        if not 0 < recency < math.inf:
            raise ValueError(f"task.recency must be positive and finite, got {recency}")
        lengths = (length, *test_lengths)
        if min(lengths) < 1 or not 0 <= context < min(lengths):
            raise ValueError(f"task.context must be in [0, task.length), got {context} for lengths {lengths}")
        given = {"split_by": split_by, "valid_fraction": valid_fraction, "test_fraction": test_fraction}
        given = {name: value for name, value in given.items() if value is not None}
        if given and not files:
            raise ValueError(f"task.{next(iter(given))} needs task.files; the speeches are always split by year")
        self.corpus: Corpus = user_files(files, **given) if files else sotu()  # type: ignore[arg-type]
        self.fingerprint = self.corpus.fingerprint()
        self.vocabulary = Vocabulary(self.corpus.text("train"))
        self.spec = TaskSpec("decoder", self.vocabulary.size, length)
        self.chance = math.log(self.vocabulary.size - UNKNOWN)
        self.context, self.segments, self.test_lengths, self.recency = context, segments, test_lengths, recency
        self._encoded = {
            split: [self.vocabulary.encode(document) for document in getattr(self.corpus, split)] for split in SPLITS
        }
        self._streams = {split: Stream(documents, segments) for split, documents in self._encoded.items()}
        self.notes = (self.corpus.note, *(self._describe(split) for split in SPLITS))

    def train_batches(self, seed: int, batch_size: int) -> grain.MapDataset:
        """Windows that begin anywhere in the training text, uniformly but for `recency`."""
        window = partial(_training_window, self._streams["train"], self.spec.length, self.recency)
        return random_batches(window, seed, batch_size)

    def evaluations(self) -> Mapping[str, Evaluation]:
        """The whole validation and test text; the test text at other lengths under `test@N`."""
        return {
            "valid": self._streams["valid"].evaluation(self.spec.length, self.context),
            "test": self._streams["test"].evaluation(self.spec.length, self.context),
        } | {f"test@{length}": self._streams["test"].evaluation(length, self.context) for length in self.test_lengths}

    def baselines(self) -> Mapping[str, Mapping[str, float]]:
        """Nats per character of: a uniform guess, training frequencies, bz2 alone, and bz2 primed with the training
        text.

        `bz2_primed` is the growth of the compressed training text when the held-out text is put after it.
        """
        train = self.corpus.text("train").encode("utf8")
        return {split: self._baselines(split, train, self._train_bits) for split in ("valid", "test")}

    @cached_property
    def _train_bits(self) -> int:
        return _bz2_bits(self.corpus.text("train").encode("utf8"))

    def _baselines(self, split: str, train: bytes, train_bits: int) -> dict[str, float]:
        text = self.corpus.text(split)
        held = text.encode("utf8")
        counts = np.bincount(np.concatenate(self._encoded["train"]), minlength=self.vocabulary.size)[UNKNOWN:] + 1
        log_frequency = np.log(counts / counts.sum())
        unigram = -float(log_frequency[np.concatenate(self._encoded[split]) - UNKNOWN].mean())
        nats = math.log(2) / len(text)
        return {
            "uniform": self.chance,
            "unigram": unigram,
            "bz2": _bz2_bits(held) * nats,
            "bz2_primed": (_bz2_bits(train + held) - train_bits) * nats,
        }

    def metrics(self, loss: float, accuracy: float) -> dict[str, float]:
        """Nats and bits per character."""
        return {"loss": loss, "accuracy": accuracy, "nats_per_char": loss, "bits_per_char": loss / math.log(2)}

    def _describe(self, split: str) -> str:
        documents = self._encoded[split]
        unknown = sum(int((document == UNKNOWN).sum()) for document in documents)
        extra = (
            f", {unknown} of them unseen in training" if split != "train" else f", {self.vocabulary.size - 2} different"
        )
        return f"{split}: {counted(len(documents), 'document')}, {sum(map(len, documents)):,} characters{extra}"


def _bz2_bits(data: bytes) -> int:
    return 8 * len(bz2.compress(data))
