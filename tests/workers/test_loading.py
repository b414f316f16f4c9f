"""Which device a worker gets, and what it is told when that is not the one it asked for."""

from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from tests.integration.conftest import write_tiny_model

from llmrt.engine.cpu_device import CpuDevice
from llmrt.wire.errors import ConfigError
from llmrt.workers import loading
from llmrt.workers.loading import load_model
from llmrt.workers.settings import WorkerSettings


@pytest.fixture(scope="module")
def tiny(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_tiny_model(path, smollm2_path, seed=0)
    return path


def numerics_of(settings: WorkerSettings) -> str:
    model = load_model(settings, generation=1)
    model.arena.close()
    return model.contract.numerics_id


def make_settings(model: Path, device: str = "auto", **change: object) -> WorkerSettings:
    settings = WorkerSettings(model=model, device=device, kv_tokens=64, threads=1)
    return replace(settings, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_the_compiled_step_is_taken_where_it_can_run(tiny: Path, device: str) -> None:
    with capture_logs() as logs:
        assert numerics_of(make_settings(tiny, device)) == "cpu-1/bf16/kv-bf16"
    assert logs == []


def test_settings_reach_the_compiled_step(tiny: Path) -> None:
    settings = make_settings(tiny, "cpu", dtype="int8", kv_cache_dtype="fp8", threads=2)
    model = load_model(replace(settings, cpu_family="portable"), generation=1)
    model.arena.close()
    assert model.contract.numerics_id == "cpu-1/q8/kv-fp8"
    assert isinstance(model.device, CpuDevice)
    assert (model.device.family.name, model.device.threads) == ("portable", 2)


def test_weights_are_hashed_alike_by_all_devices(tiny: Path) -> None:
    """Workers of two devices can be a pair: all of the contract but the numerics is the same."""
    contracts = []
    for device in ("cpu", "torch", "cpu"):
        model = load_model(make_settings(tiny, device), generation=1)
        model.arena.close()
        contracts.append(model.contract)
    assert len({contract.model_hash for contract in contracts}) == 1
    assert contracts[0] == contracts[2]


@pytest.mark.usefixtures("no_library")
def test_torch_replaces_a_step_that_was_not_built_with_a_warning(tiny: Path) -> None:
    with capture_logs() as logs:
        assert numerics_of(make_settings(tiny)).startswith("torch-")
    (entry,) = logs
    assert (entry["event"], entry["log_level"]) == ("device.replaced", "warning")
    assert "install a C compiler" in entry["reason"]
    assert "speed" in entry["lost"]


@pytest.mark.usefixtures("no_library")
def test_a_step_that_was_asked_for_and_not_built_is_an_error(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"not built.*install a C compiler"):
        numerics_of(make_settings(tiny, "cpu"))


@pytest.mark.usefixtures("no_library")
def test_without_step_and_torch_both_remedies_are_named(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"C compiler.* or use torch: pip install 'llmrt\[torch"):
        numerics_of(make_settings(tiny))


@pytest.mark.parametrize(
    ("device", "change", "message"),
    [
        ("gpu", {}, "device is 'gpu': one of auto, cpu, torch"),
        ("torch", {"kv_cache_dtype": "int8"}, "int8 and fp8 need --device cpu"),
        ("torch", {"kv_cache_dtype": "fp8"}, "int8 and fp8 need --device cpu"),
        ("torch", {"cpu_family": "portable"}, "only the cpu device has families"),
        ("cpu", {"cpu_family": "mmx"}, "cpu_family is 'mmx': this CPU and build can run"),
        ("cpu", {"kv_cache_dtype": "fp4"}, "kv_cache_dtype is 'fp4'"),
        ("cpu", {"dtype": "fp16"}, "dtype is 'fp16': one of auto, bf16, f32, int8"),
    ],
)
def test_a_setting_that_a_device_does_not_have_is_named(
    tiny: Path, device: str, change: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        numerics_of(make_settings(tiny, device, **change))
