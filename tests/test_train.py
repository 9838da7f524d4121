"""pretrain/train.py as a user starts it: with DeepSpeed's launcher, as a single process, and with wrong input."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.active_extensions import extensions
from pretrain.checkpoint.format.manifest import MANIFEST
from tests.support.launch import ROOT, free_port, train_ranks
from tests.support.run_rows import rows

METRICS = {"step", "consumed_samples", "consumed_tokens", "seq_length", "loss", "lr", "grad_norm", "loss_scale",
           "skipped_steps", "step_time_ms", "data_time_ms", "tokens_per_second", "tflops_per_device", "mfu",
           "memory_bytes", "peak_memory_bytes", "eta_seconds", "global_batch_size", "loss_max", "grad_norm_max",
           "clip_rate", "clip_norm", "param_norm", "update_ratio", "tflops_exact_per_device", "mfu_exact",
           "forward_time_ms", "backward_time_ms", "reduce_time_ms", "optimizer_time_ms", "save_time_ms",
           "eval_time_ms", "pipeline_bubble", "host_memory_bytes", "power_watts", "goodput",
           *(key for extension in extensions() for key in extension.metrics)}
CONFIG = ROOT / "ds_configs" / "pipeline2_zero1_bf16.json"


def _flags(corpus: str, run: Path, *others: str, config: Path = CONFIG) -> list[str]:
    return ["--deepspeed_config", str(config), "--model", "tiny", "--model_overrides",
            "vocab_size=256,n_layer=2,n_embd=64,resid_pdrop=0.1", "--train_data", corpus, "--seq_length", "64",
            "--split", "80,20,0", "--micro_batch_size", "2", "--gradient_accumulation_steps", "2",
            "--learning_rate", "1e-3", "--eval_steps", "1", "--log_interval", "1", "--save", str(run), *others]


def _environment() -> dict[str, str]:
    scripts = str(Path(sys.executable).parent)
    return {**os.environ, "PATH": os.pathsep.join([scripts, os.environ["PATH"]]), "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu", "MASTER_PORT": str(free_port())}  # another run may use torch's default port


def launch(ranks: int, flags: list[str]) -> subprocess.CompletedProcess[str]:
    """Run `deepspeed --num_accelerators RANKS pretrain/train.py FLAGS`."""
    command = ["deepspeed", "--quiet", "--num_accelerators", str(ranks), "--master_port", str(free_port()),
               str(ROOT / "pretrain" / "train.py"), *flags]
    return subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=900)


def start_one_rank(flags: list[str], **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `python pretrain/train.py FLAGS` with one rank, outside the repository folder."""
    return subprocess.run([sys.executable, str(ROOT / "pretrain" / "train.py"), *flags], cwd="/",
                          env={**_environment(), **environ}, capture_output=True, text=True, timeout=900)


def losses(run: Path) -> list[tuple[int, float, float]]:
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows(run) if "loss" in row]


@pytest.fixture(scope="module")
def runs(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[str]]:
    """Return a run stopped after 3 of 6 steps and resumed, an uninterrupted run, and the output of the resumed one."""
    base = tmp_path_factory.mktemp("runs")
    for run, *more in (("uninterrupted",), ("resumed", "--exit_step", "3")):
        done = train_ranks(2, _flags(corpus, base / run, "--train_steps", "6", *more), base)
        assert [rank.returncode for rank in done] == [0, 0], done[0].stdout + done[1].stdout
    second = launch(2, _flags(corpus, base / "resumed", "--train_steps", "6", "--resume", "required"))
    assert second.returncode == 0, second.stdout + second.stderr
    return base / "resumed", base / "uninterrupted", second.stdout.splitlines()


def test_resumed_run_equals_the_uninterrupted_one(runs: tuple[Path, Path, list[str]]) -> None:
    resumed, uninterrupted, _ = runs
    assert losses(resumed) == losses(uninterrupted)
    assert [step for step, *_ in losses(uninterrupted)] == [1, 2, 3, 4, 5, 6]


def test_run_folder_has_the_documented_files(runs: tuple[Path, Path, list[str]]) -> None:
    resumed, _, _ = runs
    assert rows(resumed)[0].keys() >= METRICS
    evaluations = [row for row in rows(resumed) if row.get("split") == "valid"]
    assert {"eval_loss", "eval_ppl"} <= evaluations[-1].keys()
    events = [row["event"] for row in rows(resumed, "events.jsonl")]
    assert events == ["start", "save", "stop", "start", "resume", "save", "stop"]
    starts = json.loads((resumed / "run.json").read_text())
    assert len(starts) == 2
    assert starts[0]["flags"]["seq_length"] == 64
    assert starts[0]["num_parameters"] > 0
    assert {"versions", "git_commit", "hosts", "deepspeed_config", "model_config", "data"} <= starts[0].keys()
    folder = resumed / "checkpoints"
    assert (folder / "latest").read_text() == "global_step6"
    assert not list(folder.glob(".tmp*"))
    assert json.loads((folder / "global_step6" / MANIFEST).read_text())["consumed_samples"] == 6 * 4


def test_output_in_a_log_is_short(runs: tuple[Path, Path, list[str]]) -> None:
    *_, printed = runs
    steps = [line for line in printed if line.startswith("step ")]
    assert len(steps) == 4, printed  # steps 4, 5, 6 and the evaluation
    assert len(printed) <= 12, printed
    saved = [line for line in printed if line.startswith("saved ")]
    assert len(saved) == 1
    assert re.search(r"/checkpoints/global_step6 \([\d.]+ MB, [\d.]+ s\)$", saved[0])
    (finished,) = [line for line in printed if line.startswith("finished 6 steps in ")]
    after = printed[printed.index(finished) + 1:]
    also = [line for line in after if not line.startswith("next: ds-pretrain ")]  # the others: what extensions advise
    assert [line.split()[:3] for line in also] == [["also:", "ds-pretrain", name] for name in ("evaluate", "export")]
    assert not any("\r" in line or "WARNING" in line for line in printed)


def test_a_complete_run_rejects_other_evaluation_data(runs: tuple[Path, Path, list[str]], corpus: str,
                                                      tmp_path: Path) -> None:
    other = str(tmp_path / "other")
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{corpus}{suffix}", f"{other}{suffix}")
    first_of_two = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for flag, value, name in (("--valid_data", other, f"--data {other}"), ("--split", "70,20,10", "--split valid")):
        done = start_one_rank(_flags(corpus, runs[0], "--train_steps", "6", flag, value), **first_of_two)
        _assert_rejected(done, f"{flag} {value}", "the run is complete (6 of 6 steps",
                         f"`ds-pretrain evaluate {runs[0]} {name}")


def _assert_rejected(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("ds-pretrain: error: ")
    for word in words:
        assert word in lines[0]
    assert done.stdout == ""


def test_resuming_another_run_is_rejected(runs: tuple[Path, Path, list[str]], corpus: str, tmp_path: Path) -> None:
    resumed, _, _ = runs
    one = ROOT / "ds_configs" / "zero1_bf16.json"
    required = _flags(corpus, tmp_path / "new", "--train_steps", "6", "--resume", "required", config=one)
    _assert_rejected(start_one_rank(required), "--resume required", "no checkpoint")
    never = _flags(corpus, resumed, "--train_steps", "9", "--resume", "never", config=one)
    _assert_rejected(start_one_rank(never), "--resume never", "global_step6")
    first_of_two = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for flag, value, word in (("--document_attention", "true", "--document_attention"),
                              ("--model_overrides", "vocab_size=256,n_layer=3,n_embd=64", "model num_layers")):
        changed = _flags(corpus, resumed, "--train_steps", "9", flag, value)
        _assert_rejected(start_one_rank(changed, **first_of_two), word, "in the checkpoint and")
    scheduled = tmp_path / "scheduled.json"
    scheduled.write_text(one.read_text().replace('"bf16"', '"scheduler": {"type": "WarmupLR", "params": {}}, "bf16"'))
    _assert_rejected(start_one_rank(_flags(corpus, resumed, "--train_steps", "9", config=scheduled)), "scheduler",
                     "the flags in the checkpoint and WarmupLR in this run")


def test_wrong_input_is_rejected_in_one_line(corpus: str, tmp_path: Path) -> None:
    flags = _flags(corpus, tmp_path / "run", "--train_steps", "6", config=ROOT / "ds_configs" / "zero1_bf16.json")
    _assert_rejected(start_one_rank([*flags, "--seq_lenght", "64"]), "--seq_lenght", 'Did you mean "--seq_length"?')
    _assert_rejected(start_one_rank(flags, RANK="0", WORLD_SIZE="many"), "WORLD_SIZE", "'many'")


def test_a_rejection_is_the_last_line_and_leaves_no_process(corpus: str, tmp_path: Path) -> None:
    command = ["deepspeed", "--num_accelerators", "2", "--master_port", str(free_port()),
               str(ROOT / "pretrain" / "train.py"), *_flags(corpus, tmp_path / "rejected", "--train_steps", "0")]
    done = subprocess.run(command, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          timeout=300)
    lines = done.stdout.splitlines()
    assert done.returncode == 2, done.stdout
    assert "exits with return code = 2" in done.stdout  # DeepSpeed's launcher prints this before our last line
    assert lines[-1] == "ds-pretrain: error: --train_steps: found 0; expected at least 1."
    assert sum("ds-pretrain: error: " in line for line in lines) == 1
    commands = [_content(path) for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert not any(str(tmp_path / "rejected").encode() in command for command in commands)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process has ended
        return b""


def test_a_port_in_use_is_named(corpus: str, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = start_one_rank(_flags(corpus, tmp_path / "run", "--train_steps", "6",
                            config=ROOT / "ds_configs" / "zero1_bf16.json"), MASTER_PORT=port)
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"MASTER_PORT: another program listens on port {port}" in done.stderr.strip().splitlines()[-1]


def test_yaml_keys_are_the_names_of_flags(corpus: str, tmp_path: Path) -> None:
    words = _flags(corpus, tmp_path / "run", config=ROOT / "ds_configs" / "zero1_bf16.json")
    text = "".join(f"{key.removeprefix('--')}: {value}\n" for key, value in zip(words[::2], words[1::2], strict=True))
    (tmp_path / "run.yaml").write_text(text + "train_steps: 50\n")
    (done,) = train_ranks(1, ["--config", str(tmp_path / "run.yaml"), "--train-steps", "1"], tmp_path)
    assert done.returncode == 0, done.stdout
    assert len(losses(tmp_path / "run")) == 1
    (tmp_path / "bad.yaml").write_text("train_stepz: 50\n")
    _assert_rejected(start_one_rank(["--config", str(tmp_path / "bad.yaml")]), "bad.yaml", "train_stepz",
                     'Did you mean "train_steps"?')
