"""--deterministic: the settings of torch and the variables of CUDA, and what rejects them. See also tests/gpu."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pretrain.config.flags.parse import parse_arguments
from pretrain.config.validate import check_settings
from pretrain.distributed.device import Device, cpu_device
from pretrain.engine.prepare import VARIABLES, operator_without_variant, set_deterministic, set_deterministic_variables
from pretrain.errors import ConfigError
from tests.support.cases import config, flags

CUDA = Device("cuda", fp16=True, bf16=True, memory_bytes=0)


@pytest.fixture
def _restored() -> Iterator[None]:
    yield
    set_deterministic(False)


@pytest.mark.usefixtures("_restored")
def test_the_mode_raises_errors_instead_of_warnings() -> None:
    """torch's flash attention is deterministic only then."""
    set_deterministic(True)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
    with pytest.raises(RuntimeError) as caught:
        torch.nn.MaxUnpool1d(2)(*torch.nn.MaxPool1d(2, return_indices=True)(torch.ones(1, 1, 4)))
    assert operator_without_variant(caught.value) == "max_unpooling2d_forward_out"
    assert operator_without_variant(RuntimeError("out of memory")) == ""
    set_deterministic(False)
    assert not torch.are_deterministic_algorithms_enabled()


def test_variables_of_the_user_remain() -> None:
    environ = {"NCCL_ALGO": "Tree"}
    set_deterministic_variables(environ)
    assert environ == {**VARIABLES, "NCCL_ALGO": "Tree"}


@pytest.mark.parametrize(("name", "value", "device", "error"), [
    ("CUBLAS_WORKSPACE_CONFIG", ":0:0", CUDA, r"CUBLAS_WORKSPACE_CONFIG: found :0:0; expected :4096:8 or :16:8"),
    ("NCCL_ALGO", "nvls", CUDA, r"NCCL_ALGO: found nvls; expected Ring or Tree"),
    ("NCCL_ALGO", "^NVLS,NVLSTree", CUDA, ""),
    ("CUBLAS_WORKSPACE_CONFIG", ":0:0", cpu_device(), ""),
])
def test_variables_that_make_results_differ_are_rejected(name: str, value: str, device: Device, error: str, corpus: str,
                                                         tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, value)
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config(1)))
    args = parse_arguments([f"--{key}={value}" for key, value in flags(
        corpus, deterministic="true", deepspeed_config=path, save=tmp_path / "run").items()])
    if not error:
        check_settings(args, world_size=1, device=device)
        return
    with pytest.raises(ConfigError, match=error):
        check_settings(args, world_size=1, device=device)
