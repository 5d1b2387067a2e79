"""Tile sizes: given, measured or by rule; the file that autotune writes; environments that are not what they say."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import mha_kernels as mk
from mha_kernels import autotune, tuned
from mha_kernels.arguments import build_spec
from mha_kernels.pallas.gpu.forward import PallasGPU
from mha_kernels.pallas.tpu import operands as tpu_operands
from mha_kernels.pallas.tpu.forward import PallasTPU
from tests.mha_kernels.kernel_drivers import OLD, TPU

HALF = jnp.zeros((1, 4000, 2, 64), jnp.bfloat16)
NOTHING = build_spec(HALF, HALF)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MHA_KERNELS_TUNED", str(tmp_path))
    tuned._read.cache_clear()
    return tmp_path


def write(folder: Path, text: str) -> None:
    (folder / "cpu.json").write_text(text)


def test_given_sizes_go_before_measured_ones_and_those_before_the_rule(folder: Path) -> None:
    assert PallasTPU().settled(HALF) == PallasTPU(512, 512)
    by_length = {"1024": {"query_tile": 256, "key_tile": 128}, "4096": {"query_tile": 1024, "key_tile": 256}}
    write(folder, json.dumps({"sizes": {"PallasTPU bfloat16 64": by_length}}))
    tuned._read.cache_clear()
    assert PallasTPU().settled(HALF) == PallasTPU(1024, 256)  # 4000 is nearer to 4096
    assert PallasTPU().settled(HALF[:, :1000]) == PallasTPU(256, 128)
    assert PallasTPU(key_tile=384).settled(HALF) == PallasTPU(1024, 384)
    assert PallasTPU().settled(HALF.astype(jnp.float32)) == PallasTPU(512, 512)
    assert PallasTPU().tiles(HALF, HALF, NOTHING) == {"query_tile": 1024, "key_tile": 256}


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "cpu.json is not used: JSONDecodeError"),
        ("[]", "cpu.json is not used: TypeError"),
        ("{}", "cpu.json is not used: KeyError"),
        ('{"sizes": {"PallasTPU bfloat16 64": {"0": {}}}}', "cpu.json is not used: ValueError"),
        ('{"sizes": {"PallasTPU bfloat16 64": {"long": {}}}}', "cpu.json is not used: ValueError"),
        ('{"sizes": {"PallasTPU bfloat16 64": 7}}', "cpu.json is not used: AttributeError"),
        ('{"sizes": {"PallasTPU bfloat16 64": {"64": {"key_tile": 100}}}}', "are not used: PallasTPU key_tile is 100"),
        ('{"sizes": {"PallasTPU bfloat16 64": {"64": {"colour": 1}}}}', "are not used: .*unexpected keyword"),
    ],
)
def test_a_broken_file_is_reported_and_not_used(folder: Path, caplog: Any, text: str, message: str) -> None:
    tuned._say.cache_clear()
    write(folder, text)
    assert PallasTPU().settled(HALF) == PallasTPU(512, 512)
    [record] = caplog.records
    assert re.search(message, record.getMessage())


def test_the_rule_for_a_gpu_leaves_registers_for_sums_and_tables(folder: Path) -> None:
    table = build_spec(HALF, HALF, bias=mk.T5Bias(jnp.zeros((2, 8))))
    wide = jnp.zeros((1, 64, 2, 200), jnp.bfloat16)
    assert PallasGPU().settled(HALF, HALF, NOTHING) == PallasGPU(128, 64, 2)
    assert PallasGPU().settled(HALF, HALF, table) == PallasGPU(64, 64, 2)
    assert PallasGPU().settled(HALF, HALF, NOTHING, cotangents=2) == PallasGPU(128, 32, 2)
    assert PallasGPU().settled(wide, wide, NOTHING) == PallasGPU(64, 32, 2)
    assert PallasGPU(192, stages=3).settled(HALF, HALF, table) == PallasGPU(192, 64, 3)


@pytest.mark.parametrize("kind, size", [("TPU v4", 256), ("TPU v5 lite", 512), ("TPU v5p", 512), ("TPU7x", 512)])
def test_the_rule_for_a_tpu_follows_its_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, size: int
) -> None:
    monkeypatch.setattr(tuned, "device_kind", lambda: kind)
    assert PallasTPU().settled(HALF) == PallasTPU(size, size)
    assert tpu_operands.compiler_params(1, 2).vmem_limit_bytes < tpu_operands.VMEM[kind]


def fake(best: dict[str, int]) -> Any:
    """A timer that likes one combination best, and on which the largest tiles do not compile."""

    def timer(driver: PallasTPU, arrays: Any) -> float:
        if driver.query_tile == driver.key_tile == 1024:
            raise RuntimeError("scoped vmem: out of memory\nwith a long explanation")
        return 1.0 + sum(getattr(driver, name) != size for name, size in best.items())

    return timer


def test_the_tuner_writes_what_the_drivers_read(folder: Path, capsys: Any) -> None:
    file = tuned.path(tuned.device_kind())
    assert file == folder / "cpu.json"
    for length, best in ((64, {"query_tile": 256, "key_tile": 1024}), (128, {"query_tile": 512, "key_tile": 256})):
        autotune.tune(TPU, [(length, 16)], file, heads=1, timer=fake(best))
        tuned._read.cache_clear()
        query = jnp.zeros((1, length, 1, 16), jnp.bfloat16)
        assert PallasTPU().settled(query) == PallasTPU(**best)
    assert len(json.loads(file.read_text())["sizes"]["PallasTPU bfloat16 16"]) == 2  # the first one is kept
    assert "scoped vmem: out of memory\n" in capsys.readouterr().out
    assert list(folder.iterdir()) == [file]


def test_where_nothing_runs_nothing_is_written(folder: Path) -> None:
    def timer(driver: Any, arrays: Any) -> float:
        raise RuntimeError

    autotune.tune(TPU, [(64, 16)], folder / "cpu.json", heads=1, timer=timer)
    assert not list(folder.iterdir())


def test_the_timer_runs_the_kernels() -> None:
    arrays = tuple(jnp.ones((1, 40, 1, 8)) for _ in range(3))
    assert 0 < autotune.measured(TPU, arrays) < 60


def test_the_command_needs_a_device(capsys: Any) -> None:
    assert autotune.main([]) == 3
    assert capsys.readouterr().err == "autotune: no GPU or TPU here, the default backend is cpu\n"


def reason(driver: Any, monkeypatch: pytest.MonkeyPatch, backend: str, **device: str) -> str:
    """Why the driver declines on a machine with that backend and device."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(**device)])
    found = driver.unsupported_reason(HALF, HALF, HALF, NOTHING, ())
    assert found is not None
    return found


@pytest.mark.parametrize("capability", ["8.0", "10.0", "12.0", "gfx942"])
def test_other_gpus_decline(monkeypatch: pytest.MonkeyPatch, capability: str) -> None:
    """Compiling for a wrong architecture ends the process, so the driver has to know."""
    found = reason(PallasGPU(), monkeypatch, "gpu", compute_capability=capability, device_kind="some GPU")
    assert f"the device has {capability}" in found or (OLD and "needs JAX 0.11" in found)


def test_a_gpu_without_a_capability_declines(monkeypatch: pytest.MonkeyPatch) -> None:
    found = reason(PallasGPU(), monkeypatch, "gpu", device_kind="some GPU")
    assert "the device has unknown" in found or (OLD and "needs JAX 0.11" in found)


def test_an_unknown_tpu_declines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "the device is TPU v99" in reason(PallasTPU(), monkeypatch, "tpu", device_kind="TPU v99")


def test_tiles_that_do_not_fit_in_shared_memory_decline(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = reason(PallasGPU(192, stages=5), monkeypatch, "gpu", compute_capability="9.0", device_kind="NVIDIA H200")
    assert "needs 262144 bytes of shared memory; a block has 232448" in found or (OLD and "needs JAX 0.11" in found)


@pytest.mark.parametrize("backend", ["gpu", "tpu", "METAL"])
def test_auto_runs_on_a_machine_that_is_not_what_it_says(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """A backend with no kernel for its device takes the next implementation."""
    device = SimpleNamespace(device_kind="unknown", compute_capability="0.0", platform=backend)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "devices", lambda *_: [device])
    plan = mk.explain(HALF, HALF, HALF)
    assert plan.implementation in ("blockwise", "cudnn")


def test_importing_needs_no_mosaic_gpu() -> None:
    """A jaxlib that was built without it."""
    code = """
import sys
sys.modules["jax.experimental.pallas.mosaic_gpu"] = None
import jax.numpy as jnp, mha_kernels as mk
x = jnp.ones((1, 3, 1, 2), jnp.bfloat16)
print(mk.explain(x, x, x).declined["pallas_gpu"].split(";")[0], mk.attention(x, x, x).shape)
"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(Path(mk.__file__).parents[1]), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout == "pallas_gpu needs JAX 0.11 or newer with Mosaic GPU (1, 3, 1, 2)\n", run.stderr
