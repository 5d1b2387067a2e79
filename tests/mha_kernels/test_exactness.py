"""docs/exactness.md holds what is measured: every row is measured again, the long ones by scripts/slow."""

import jax
import pytest

from benchmarks import exactness
from mha_kernels.pallas.gpu import forward as pallas_gpu

PAGE = exactness.documented()
NEW = tuple(map(int, jax.__version__.split(".")[:2])) >= pallas_gpu.OLDEST  # has an interpreter of Mosaic GPU
RUNS_HERE = {row for row in PAGE if NEW or row[0] != "pallas_gpu"}
QUICK = sorted(row for row in RUNS_HERE if row[2] == 128)
LONG = sorted(RUNS_HERE - set(QUICK))


def check(row: tuple[str, str, int], request: pytest.FixtureRequest) -> None:
    if row[0] == "native":
        request.getfixturevalue("native")
    found = exactness.measured(*row)
    assert not exactness.too_large(found, PAGE[row], row[1]), (found, PAGE[row])


TYPES = {
    "reference": set(exactness.DTYPES),
    "blockwise": set(exactness.DTYPES),
    "native": {"float32", "bfloat16", "float16"},
    "xla": {"float32", "bfloat16"},
    "pallas_tpu": {"float32", "bfloat16"},
    "pallas_gpu": {"float16", "bfloat16"},
}


@pytest.mark.parametrize("name", TYPES)
def test_the_page_has_every_type_and_length(name: str) -> None:
    lengths = {n for n in exactness.LENGTHS if n <= exactness.LONGEST[name]}
    expected = {(name, dtype, n) for dtype in TYPES[name] for n in lengths} - {("xla", "bfloat16", 1)}  # it declines
    assert {row for row in PAGE if row[0] == name} == expected


@pytest.mark.parametrize("row", QUICK, ids=str)
def test_a_row_of_length_128(row: tuple[str, str, int], request: pytest.FixtureRequest) -> None:
    check(row, request)


@pytest.mark.slow
@pytest.mark.parametrize("row", LONG, ids=str)
def test_any_other_row(row: tuple[str, str, int], request: pytest.FixtureRequest) -> None:
    check(row, request)


def test_the_check_can_fail() -> None:
    page = PAGE["blockwise", "float32", 128]
    assert exactness.too_large([6 * number for number in page], page, "float32")
