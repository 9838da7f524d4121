"""Advice after an out-of-memory error. A real run fails, and the advised change makes the run succeed."""

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.config.layout import Layout
from pretrain.extensions.memory_watch.changes_that_fit import alternatives, changes_that_fit, differences
from pretrain.memory.compare import compare
from pretrain.memory.compare.compare import Workload
from pretrain.memory.hardware import make_cluster
from pretrain.model.config import load_model_config
from tests.support.launch import ROOT
from tests.test_train import _environment

ADDRESS_SPACE = 3 * 2**30  # bytes; Python, torch and DeepSpeed map more than a third of it
MICRO_BATCH_SIZE = 96


def train(corpus: str, run: Path, micro_batch_size: int, accumulation: int) -> subprocess.CompletedProcess[str]:
    """Train two steps in a process that may map at most ADDRESS_SPACE bytes."""
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))

    flags = {"deepspeed_config": ROOT / "ds_configs/zero1_bf16.json", "model": "tiny", "train_data": corpus,
             "model_overrides": "n_layer=8,n_embd=64,attn_pdrop=0.1", "seq_length": 256, "split": "1,0,0",
             "learning_rate": "1e-3", "log_interval": 1, "train_steps": 2, "save": run,
             "micro_batch_size": micro_batch_size, "gradient_accumulation_steps": accumulation}
    command = [sys.executable, str(ROOT / "pretrain/train.py"), *(f"--{key}={value}" for key, value in flags.items())]
    # The limit counts mapped addresses. With `keep_freed_memory` the heap never shrinks, and maps unused memory.
    environ = {**_environment(), "MALLOC_TRIM_THRESHOLD_": "131072"}
    return subprocess.run(command, env=environ, preexec_fn=limit, capture_output=True, text=True, timeout=900,
                          check=False)


def test_the_advised_change_makes_the_run_succeed(corpus: str, tmp_path: Path) -> None:
    failed = train(corpus, tmp_path / "failed", MICRO_BATCH_SIZE, 1)
    assert failed.returncode == 1, failed.stdout + failed.stderr
    assert "Traceback" not in failed.stderr
    lines = [line for line in failed.stderr.splitlines() if line.startswith("ds-pretrain")]
    assert re.search(r"error: rank 0: out of memory in \w+ \(\w+\.py:\d+\): .*allocate", lines[0]), failed.stderr
    assert re.search(r"predicted [\d.]+ [GM]iB of tensors at the peak \(parameters .*activations .*\); the process had "
                     r"grown by [\d.]+ [GM]iB; [\d.]+ [GM]iB were available for tensors", lines[1])
    changes = lines[3:]
    assert 1 <= len(changes) <= 3
    found = re.search(r"micro-batch (\d+) x (\d+) accumulation steps", failed.stderr)
    assert found, failed.stderr
    micro, accumulation = map(int, found.groups())
    assert micro * accumulation == MICRO_BATCH_SIZE
    done = train(corpus, tmp_path / "done", micro, accumulation)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "memory: predicted" in done.stdout


def test_alternatives_have_the_same_global_batch_and_ranks() -> None:
    model = load_model_config("gpt2")
    cluster = make_cluster(gpu="h100", world_size=8, nodes=None, gpus_per_node=8)
    workload = Workload.of(model, cluster)
    layout = Layout(world_size=8, zero_stage=1, micro_batch_size=8, gradient_accumulation_steps=4, precision="fp16")
    layouts = [candidate.layout for candidate in alternatives(layout, workload)]
    assert {other.global_batch_size for other in layouts} == {layout.global_batch_size}
    assert {other.world_size for other in layouts} == {8}
    assert {other.precision for other in layouts} == {"fp16"}
    assert {other.zero_stage for other in layouts} == {1, 2, 3}
    assert {} in [differences(layout, other) for other in layouts]  # the layout itself
    assert {"micro": "micro-batch 2 x 16 accumulation steps"} in [differences(layout, other) for other in layouts]


def test_changes_of_the_recomputation_are_described_by_flags_and_keys() -> None:
    plain, interval = Layout(), Layout(activation_checkpoint_interval=1)
    blocks, attention = Layout(recompute="blocks"), Layout(recompute="attention")
    offloaded = Layout(activation_checkpoint_interval=1, offload_activations=True)
    key, offload = '"pipeline": {"activation_checkpoint_interval": 1}', \
        '"activation_checkpointing": {"cpu_checkpointing": true}'
    for old, new, expected in (
            (plain, attention, "--recompute attention"), (plain, interval, key),
            (plain, offloaded, f"{key} and {offload}"), (blocks, offloaded, offload), (interval, offloaded, offload),
            (attention, interval, f"{key} and without --recompute"), (attention, Layout(recompute="mlp"),
                                                                       "--recompute mlp")):
        assert differences(old, new) == {"recompute": expected}
    assert differences(blocks, interval) == {}


def test_changes_that_fit_begin_with_the_fewest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "step_estimates", lambda cluster: None)  # no extension predicts step times
    title, *changes = changes_that_fit(Layout(micro_batch_size=8), load_model_config("gpt2"), ranks_per_node=1,
                                       budget_bytes=4 * 2**30)
    assert title == "changes that are predicted to fit, the fewest first:"
    assert 1 <= len(changes) <= 3
    assert "," not in changes[0].partition(": ")[0].replace("accumulation steps", "")
