"""Real runs on a GPU: every layout, parity with the CPU, resume, memory, waiting, and the operators that are named."""

import json
import os
import re
from pathlib import Path

import pytest
import torch

from pretrain.active_extensions import extensions
from pretrain.distributed.device import compiles_cuda
from tests.distributed.test_ds_configs import EXPERTS, FILES, ranks_of
from tests.gpu.runs import Run, kernels_compute, relative_difference, start
from tests.support.cases import config, flags, fused
from tests.support.extensions import entries_of_extensions
from tests.support.launch import ROOT


@pytest.fixture
def write(tmp_path: Path):
    """Return a function that writes a DeepSpeed JSON."""
    def write(values: dict[str, object], name: str = "ds") -> Path:
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(values))
        return path

    return write


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_layout_trains(path: Path, corpus: str, tmp_path: Path) -> None:
    """The training loss of the small corpus falls within 20 steps. Where nothing computes, 3 steps must end."""
    shares_model = any(word in path.stem for word in ("pipeline", "tensor", "sequence", "experts"))
    ranks = ranks_of(path) if shares_model else 1
    if ranks > torch.cuda.device_count():
        pytest.skip(f"{ranks} ranks that share a model need as many GPUs")
    if "nvme" in path.stem and not compiles_cuda():
        pytest.skip("NVMe offload compiles an operator with nvcc, which is missing")
    steps = 20 if kernels_compute() else 3
    own = {**flags(corpus, steps=steps, micro_batch_size=2, gradient_accumulation_steps=4, learning_rate=1e-3),
           **(EXPERTS if "experts" in path.stem else {})}
    run = start(tmp_path / "run", path, own, ranks=ranks, DS_PRETRAIN_NVME_PATH=str(tmp_path))
    assert len(run.losses) == steps
    assert run.losses[-1] < run.losses[0] - 0.1 or not kernels_compute()


@pytest.mark.parametrize("stage", [0, 3])
def test_losses_in_fp32_equal_those_of_the_cpu(stage: int, corpus: str, tmp_path: Path, write) -> None:
    path = write(config(stage))
    runs = [start(tmp_path / kind, path, flags(corpus, steps=6), DS_ACCELERATOR=kind) for kind in ("cpu", "cuda")]
    assert relative_difference(runs[1].losses, runs[0].losses) < 1e-5
    norms = [[row["grad_norm"] for row in run.rows] for run in runs]
    assert relative_difference(norms[1], norms[0]) < 1e-4


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_resumed_run_has_the_same_bits(stage: int, corpus: str, tmp_path: Path, write) -> None:
    path, own = write(config(stage, precision="bf16")), flags(corpus, steps=8, overrides="resid_pdrop=0.1")
    own["deterministic"] = "true"
    complete = start(tmp_path / "complete", path, own)
    start(tmp_path / "parts", path, {**own, "exit_step": 4})
    parts = start(tmp_path / "parts", path, {**own, "resume": "required"})
    assert parts.losses == complete.losses


@pytest.mark.parametrize(("stage", "extra"), [
    (1, {}), (2, {"document_attention": "true"}), (3, {"compile_blocks": "true"}), (0, {"plain_operators": "true"}),
    (2, EXPERTS), (3, {"recompute": "blocks"}),
], ids=["flash", "documents", "compiled", "plain", "experts", "recompute"])
def test_two_deterministic_starts_have_the_same_bits(stage: int, extra: dict[str, str], corpus: str, tmp_path: Path,
                                                     write) -> None:
    ranks = min(2, torch.cuda.device_count())
    own = {**flags(corpus, steps=8, seq_length=128, overrides="" if extra is EXPERTS else "resid_pdrop=0.1"), **extra,
           "deterministic": "true", **entries_of_extensions("gpu_runs", "DETERMINISTIC")}
    path = write(config(stage, precision="bf16", micro=2))
    runs = [start(tmp_path / name, path, own, ranks=ranks) for name in ("first", "second")]
    assert runs[0].losses == runs[1].losses
    assert [row["grad_norm"] for row in runs[0].rows] == [row["grad_norm"] for row in runs[1].rows]
    assert "cuDNN" not in runs[0].output


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_model_with_experts_trains_as_on_the_cpu(stage: int, corpus: str, tmp_path: Path, write) -> None:
    """In fp32 the experts are one batched product; in bf16 they are one grouped product."""
    own = {**flags(corpus, steps=6), **EXPERTS}
    path = write(config(stage))
    runs = [start(tmp_path / kind, path, own, DS_ACCELERATOR=kind) for kind in ("cpu", "cuda")]
    assert relative_difference(runs[1].losses, runs[0].losses) < 1e-4
    grouped = start(tmp_path / "bf16", write(config(stage, precision="bf16"), "bf16"), own)
    assert relative_difference(grouped.losses, runs[0].losses) < 5e-3


def predicted_and_measured(run: Run) -> list[float]:
    """Return both peaks of the line "memory: ...", in MiB."""
    found = re.search(r"memory: predicted ([\d.]+) (MiB|GiB) at the peak .*measured ([\d.]+) (MiB|GiB)", run.output)
    assert found, run.output[-3000:]
    return [float(found[i]) * (1024 if found[i + 1] == "GiB" else 1) for i in (1, 3)]


@pytest.mark.skipif("memory_watch" not in {each.name for each in extensions()}, reason="no extension prints the line")
@pytest.mark.parametrize("extra", [{}, {"recompute": "blocks"}, {"plain_operators": "true"}],
                         ids=["usual", "recompute", "plain"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("model", ["gpt2", "llama3-1b"])
def test_memory_is_predicted_within_a_tenth(model: str, stage: int, extra: dict[str, str], corpus: str, tmp_path: Path,
                                            write) -> None:
    """The prediction is compared with torch.cuda.max_memory_allocated of a step."""
    if "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ:
        pytest.skip("torch counts the memory of its caching allocator only: DRY_GPU_CACHING=1")
    path = write(config(stage, precision="bf16", micro=4, accumulation=1))
    run = start(tmp_path / "run", path, {"model": model, "train_data": corpus, "seq_length": 512, "train_steps": 4,
                                         "split": "1,0,0", "replica_check_interval": 0, **extra})
    predicted, measured = predicted_and_measured(run)
    assert abs(predicted - measured) < 0.1 * measured


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_host_does_not_wait_between_logged_steps(stage: int, corpus: str, tmp_path: Path, write) -> None:
    """It only waits for copies that the step before has started."""
    path, waits = write(fused(config(stage, precision="bf16"))), tmp_path / "waits.txt"
    start(tmp_path / "run", path, flags(corpus, steps=14, log_interval=100, document_attention="true", seq_length=128),
          program="tools/dry_gpu/waits.py", DRY_GPU_WAITS=str(waits))
    assert not [line for line in waits.read_text().splitlines() if " event pretrain/" not in line]


def test_the_chosen_operators_are_named(corpus: str, tmp_path: Path, write) -> None:
    path, own = write(config(1, precision="bf16")), flags(corpus, steps=2, seq_length=128)
    usual = start(tmp_path / "usual", path, own)
    documents = start(tmp_path / "documents", path, {**own, "document_attention": "true"})
    plain = start(tmp_path / "plain", path, {**own, "document_attention": "true", "plain_operators": "true"})
    assert re.search(r"attention: (flash|cuDNN); optimizer: (FusedAdam of deepspeed|AdamW of torch \(fused\))",
                     usual.output)
    assert "attention: flex_attention;" in documents.output
    assert "attention: efficient with a mask (no flex_attention: --plain_operators)" in plain.output
    assert relative_difference(documents.losses, plain.losses) < 5e-3


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("model", ["gpt2", "llama3-1b", "gemma2-2b"])
def test_compiled_blocks_have_equal_losses(model: str, stage: int, corpus: str, tmp_path: Path, write) -> None:
    """Also on several GPUs, where ZeRO-3 gathers the parameters of a block before its graph runs."""
    path = write(config(stage, precision="bf16", micro=2))
    layers = "n_layer=4" if model == "gpt2" else "num_hidden_layers=4"
    own = {"model": model, "model_overrides": layers, "train_data": corpus, "seq_length": 512, "train_steps": 4,
           "split": "1,0,0"}
    ranks = min(2, torch.cuda.device_count())
    runs = [start(tmp_path / str(compiled), path, {**own, "compile_blocks": compiled}, ranks=ranks)
            for compiled in ("false", "true")]
    assert relative_difference(runs[1].losses, runs[0].losses) < 5e-3


def test_both_kinds_of_fused_adamw_are_equal_and_read_each_other(corpus: str, tmp_path: Path, write) -> None:
    if not compiles_cuda():
        pytest.skip("FusedAdam needs an nvcc of torch's CUDA version")
    values, own = config(1), flags(corpus, steps=8)
    torchs = {**values, "optimizer": {**values["optimizer"], "params": {
        **values["optimizer"]["params"], "torch_adam": True, "fused": True}}}
    paths = {"deepspeed": write(values, "deepspeed"), "torch": write(torchs, "torch")}
    complete = {name: start(tmp_path / name, path, own) for name, path in paths.items()}
    assert relative_difference(complete["torch"].losses, complete["deepspeed"].losses) < 1e-5
    for first, second in (("torch", "deepspeed"), ("deepspeed", "torch")):
        folder = tmp_path / f"{first}_to_{second}"
        start(folder, paths[first], {**own, "exit_step": 4})
        resumed = start(folder, paths[second], {**own, "resume": "required"})
        assert relative_difference(resumed.losses, complete[first].losses) < 1e-5


def test_a_gpu_without_nvcc_trains(corpus: str, tmp_path: Path) -> None:
    """Adam on the GPU is torch's, and the offloaded one is compiled by g++."""
    for name in ("zero2_bf16", "zero3_offload_optimizer_cpu"):
        run = start(tmp_path / name, ROOT / "ds_configs" / f"{name}.json",
                    flags(corpus, steps=3, micro_batch_size=2, gradient_accumulation_steps=1, learning_rate=1e-3),
                    CUDA_HOME=str(tmp_path), CUDA_PATH=str(tmp_path), TORCH_EXTENSIONS_DIR=str(tmp_path / "ops"))
        assert len(run.losses) == 3
        assert ("AdamW of torch (fused)" in run.output) == (name == "zero2_bf16")
