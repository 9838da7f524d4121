"""Steps that a cell of tests/versions.py takes with its environment: save, resume, generate, convert, consolidate.

This file and tests/versions.py import only the standard library. The environments run in separate processes.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 3600
RANKS = 2
LAUNCHER = "from deepspeed.launcher.runner import main; main()"  # the body of the script `deepspeed`
# runs several subcommands in one process, so that torch is imported once
COMMANDS = """
import json, sys
from pretrain.__main__ import main
for words in json.loads(sys.argv[1]):
    sys.argv = ["ds-pretrain", *words]
    print("$", *sys.argv, flush=True)
    if code := main():
        sys.exit(code)
"""
# checks that plain DeepSpeed reads the weights of the consolidated folder sys.argv[2] from the checkpoint sys.argv[1]
ZERO_TO_FP32 = """
import sys
from pathlib import Path
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import load_file
from pretrain.model.config import load_model_config
from pretrain.model.hf_names import tensor_rules
from pretrain.model.hf_weights import to_theirs
checkpoint, folder = Path(sys.argv[1]), Path(sys.argv[2])
read = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint.parent), tag=checkpoint.name)
written, config = load_file(folder / "model.safetensors"), load_model_config(str(folder))
expected = {name: tensor for rule in tensor_rules(config)
            for name, tensor in zip(rule.theirs, to_theirs(rule, read[rule.ours], config), strict=True)}
assert written.keys() == expected.keys(), written.keys() ^ expected.keys()
assert all(torch.equal(written[name], expected[name]) for name in written)
"""


class StepError(Exception):
    """A step failed in an environment. Holds the name of the step and the last line of its log."""


@dataclass(frozen=True)
class Environment:
    """The Python of a cell, and the folder of its runs and logs."""

    name: str
    executable: str
    folder: Path

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def variables(self) -> dict[str, str]:
        """Variables that select this checkout's package, put the environment first in PATH, and show every warning."""
        own = {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1",
               "PYTHONWARNINGS": "default", "PYTHONPYCACHEPREFIX": str(self.folder / "pycache")}
        paths = [str(Path(self.executable).parent), str(Path(sys.executable).parent), os.environ.get("PATH", "")]
        return {**os.environ, **own, "PATH": os.pathsep.join(paths)}

    def do(self, step: str, *words: object, **variables: str) -> str:
        """Run `python WORDS` with its output in STEP.log, and return the last line. Raises StepError if it fails."""
        return self.wait(step, [self.start(step, *words, **variables)])

    def start(self, step: str, *words: object, **variables: str) -> "subprocess.Popen[bytes]":
        with open(self.folder / f"{step}.log", "wb") as log:
            return subprocess.Popen([self.executable, *map(str, words)], cwd=self.folder, stdout=log,
                                    stderr=subprocess.STDOUT, env={**self.variables, **variables})

    def wait(self, step: str, processes: "list[subprocess.Popen[bytes]]") -> str:
        try:
            codes = [process.wait(TIMEOUT_S) for process in processes]
        except subprocess.TimeoutExpired:
            codes = [124]
        finally:
            for process in processes:
                process.kill()
        lines = [line for path in sorted(self.folder.glob(f"{step}*.log"))
                 for line in path.read_text(errors="replace").splitlines() if line.strip()]
        last = lines[-1] if lines else ""
        if any(codes):
            raise StepError(f"{step}: exit codes {codes}: {last}")
        # a warning from this package is a failure, because a later Python turns deprecations into errors
        warnings = [line for line in lines if "Warning: " in line and line.startswith(f"{ROOT}/")
                    and "/site-packages/" not in line]  # the virtual environment may be inside the checkout
        if warnings:
            raise StepError(f"{step}: {warnings[0]}")
        return last


def save(environment: Environment) -> None:
    """Prepare data, train, resume, verify, generate, convert and consolidate in one environment."""
    environment.do("compile", "-W", "error", "-m", "compileall", "-q",
                   *(ROOT / name for name in ("pretrain", "tools", "launch", "tests")))
    text = [str(path) for path in sorted(ROOT.glob("pretrain/**/*.py"))]
    _commands(environment, "data", ["tokenizer", *text, "--out", "tokenizer", "--vocab_size", 512],
           ["prepare", *text, "--tokenizer", "tokenizer", "--out", "tokens"])
    folder = environment.folder
    _train(environment, "save", environment.run, folder, steps=2, resume="never", launcher=True)
    _train(environment, "resume", environment.run, folder, steps=4, resume="required", launcher=False)
    _read(environment, environment, environment.run)
    environment.do("zero_to_fp32", "-c", ZERO_TO_FP32, environment.run / "checkpoints/global_step4",
                   folder / f"weights_{environment.name}")


def read_other(environment: Environment, other: Environment) -> None:
    """Resume the run that `other` saved, and consolidate it to the same weights."""
    run = Path(shutil.copytree(other.run, environment.folder / f"run_{other.name}"))
    _train(environment, f"resume_{other.name}", run, other.folder, steps=5, resume="required", launcher=False)
    _read(environment, other, run)
    weights = [folder / f"weights_{other.name}/model.safetensors" for folder in (environment.folder, other.folder)]
    if weights[0].read_bytes() != weights[1].read_bytes():
        raise StepError(f"consolidate: the weights differ from those of {other.name}")


def _train(environment: Environment, step: str, run: Path, data: Path, *, steps: int, resume: str,
           launcher: bool) -> None:
    """Train on 2 ranks of ZeRO-2 up to `steps`, under DeepSpeed's launcher or as two plain processes."""
    words = [ROOT / "pretrain/train.py", "--deepspeed_config", ROOT / "ds_configs/zero2_bf16.json", "--model", "tiny",
             "--model_overrides", "n_layer=2,n_embd=64,vocab_size=512", "--train_data", data / "tokens", "--tokenizer",
             data / "tokenizer", "--seq_length", "64", "--micro_batch_size", "2", "--gradient_accumulation_steps", "1",
             "--learning_rate", "1e-3", "--train_steps", steps, "--save", run, "--resume", resume,
             "--log_interval", "1"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    if launcher:
        environment.do(step, "-c", LAUNCHER, "--num_accelerators", RANKS, "--master_port", port, *words)
    else:
        environment.wait(step, [environment.start(
            f"{step}.rank{rank}", *words, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS),
            LOCAL_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            for rank in range(RANKS)])


def _commands(environment: Environment, step: str, *commands: list[object]) -> None:
    """Run subcommands of ds-pretrain."""
    environment.do(step, "-c", COMMANDS, json.dumps([[*map(str, words)] for words in commands]))


def _read(environment: Environment, other: Environment, run: Path) -> None:
    """Verify, sample, consolidate and convert the checkpoint that `other` saved in `run`."""
    name = other.name
    _commands(environment, f"read_{name}", ["checkpoint", "verify", run],
           ["generate", run, "--prompt", "def ", "--max_new_tokens", 8, "--step", 4],
           ["checkpoint", "consolidate", run / "checkpoints/global_step4", f"weights_{name}"],
           *(["checkpoint", "convert", run / "checkpoints/global_step4", f"universal_{name}"]
             for _ in ROOT.glob("pretrain/extensions/*/write_universal.py")))
