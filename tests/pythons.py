"""Save, resume, generate, convert and consolidate with several Pythons. Each reads the checkpoints of the others.

    python tests/pythons.py [--runs FOLDER] VERSION=PYTHON...       called by tests/pythons.sh

This script imports only the standard library. The Pythons under test run in separate processes.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 1200
RANKS = 2
LAUNCHER = "from deepspeed.launcher.runner import main; main()"  # the body of the script `deepspeed`
# runs several tools in one process, so that torch is imported once
TOOLS = """
import json, runpy, sys
for words in json.loads(sys.argv[1]):
    sys.argv = words
    print("$", *words, flush=True)
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
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
    """A step failed with one of the Pythons. Holds the name of the step and the last line of its log."""


@dataclass(frozen=True)
class Python:
    """A Python under test."""

    version: str
    executable: str
    folder: Path  # for its runs and logs

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def environment(self) -> dict[str, str]:
        """Variables that select this checkout's package, put the environment first in PATH, and show every warning."""
        own = {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1",
               "PYTHONWARNINGS": "default", "PYTHONPYCACHEPREFIX": str(self.folder / "pycache")}
        paths = [str(Path(self.executable).parent), str(Path(sys.executable).parent), os.environ.get("PATH", "")]
        return {**os.environ, **own, "PATH": os.pathsep.join(paths)}

    def do(self, step: str, *words: object, **variables: str) -> None:
        """Run `python WORDS` with its output in STEP.log. Raises StepError if it fails."""
        self.wait(step, [self.start(step, *words, **variables)])

    def start(self, step: str, *words: object, **variables: str) -> "subprocess.Popen[bytes]":
        with open(self.folder / f"{step}.log", "wb") as log:
            return subprocess.Popen([self.executable, *map(str, words)], cwd=self.folder, stdout=log,
                                    stderr=subprocess.STDOUT, env={**self.environment, **variables})

    def wait(self, step: str, processes: "list[subprocess.Popen[bytes]]") -> None:
        try:
            codes = [process.wait(TIMEOUT_S) for process in processes]
        except subprocess.TimeoutExpired:
            codes = [124]
        finally:
            for process in processes:
                process.kill()
        lines = [line for path in sorted(self.folder.glob(f"{step}*.log"))
                 for line in path.read_text(errors="replace").splitlines() if line.strip()]
        if any(codes):
            raise StepError(f"{step}: exit codes {codes}: {lines[-1] if lines else ''}")
        # a warning from this package is a failure, because a later Python turns deprecations into errors
        warnings = [line for line in lines if "Warning: " in line and line.startswith(f"{ROOT}/")
                    and "/site-packages/" not in line]  # the virtual environment may be inside the checkout
        if warnings:
            raise StepError(f"{step}: {warnings[0]}")


def train(python: Python, step: str, run: Path, data: Path, *, steps: int, resume: str, launcher: bool) -> None:
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
        python.do(step, "-c", LAUNCHER, "--num_accelerators", RANKS, "--master_port", port, *words)
    else:
        python.wait(step, [python.start(
            f"{step}.rank{rank}", *words, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS),
            LOCAL_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            for rank in range(RANKS)])


def tools(python: Python, step: str, *commands: list[object]) -> None:
    python.do(step, "-c", TOOLS, json.dumps([[str(ROOT / "tools" / str(words[0])), *map(str, words[1:])]
                                             for words in commands]))


def save(python: Python) -> None:
    """Prepare data, train, resume, verify, generate, convert and consolidate with one Python."""
    python.folder.mkdir(parents=True)
    python.do("compile", "-W", "error", "-m", "compileall", "-q", *(ROOT / name for name in ("pretrain", "tools",
                                                                                             "launch", "tests")))
    text = [str(path) for path in sorted(ROOT.glob("pretrain/**/*.py"))]
    tools(python, "data", ["train_tokenizer.py", *text, "--out", "tokenizer", "--vocab_size", 512],
          ["prepare_data.py", *text, "--tokenizer", "tokenizer", "--out", "tokens"])
    train(python, "save", python.run, python.folder, steps=2, resume="never", launcher=True)
    train(python, "resume", python.run, python.folder, steps=4, resume="required", launcher=False)
    read(python, python, python.run)
    python.do("zero_to_fp32", "-c", ZERO_TO_FP32, python.run / "checkpoints/global_step4",
              python.folder / f"weights_{python.version}")


def read(python: Python, other: Python, run: Path) -> None:
    """Verify, sample, consolidate and convert the checkpoint that `other` saved in `run`."""
    name = other.version
    tools(python, f"read_{name}", ["checkpoint.py", "verify", run],
          ["generate.py", run, "--prompt", "def ", "--max_new_tokens", 8, "--step", 4],
          ["checkpoint.py", "consolidate", run / "checkpoints/global_step4", f"weights_{name}"],
          ["checkpoint.py", "convert", run / "checkpoints/global_step4", f"universal_{name}"])


def read_other(python: Python, other: Python) -> None:
    """Resume the run that `other` saved, and consolidate it to the same weights."""
    run = Path(shutil.copytree(other.run, python.folder / f"run_{other.version}"))
    train(python, f"resume_{other.version}", run, other.folder, steps=5, resume="required", launcher=False)
    read(python, other, run)
    weights = [folder / f"weights_{other.version}/model.safetensors" for folder in (python.folder, other.folder)]
    if weights[0].read_bytes() != weights[1].read_bytes():
        raise StepError(f"consolidate: the weights differ from those of Python {other.version}")


def attempt(python: Python, results: dict[str, list[str]], seconds: dict[str, float], what: str,
            action: Callable[[], None]) -> bool:
    """Run `action` and record its failure. Return whether it succeeded."""
    print(f"[pythons] {python.version}: {what}", file=sys.stderr, flush=True)
    start, done = time.monotonic(), False
    try:
        action()
        done = True
    except (StepError, OSError) as error:
        results[python.version].append(f"{what}: {error}")
    seconds[python.version] += time.monotonic() - start
    return done


def try_all(pythons: list[Python]) -> dict[str, tuple[list[str], float]]:
    """Return (failures, seconds) of each version."""
    results: dict[str, list[str]] = {python.version: [] for python in pythons}
    seconds = dict.fromkeys(results, 0.0)
    saved = [python for python in pythons if attempt(python, results, seconds, "alone", lambda p=python: save(p))]
    for python in saved:
        for other in saved:
            if other != python:
                attempt(python, results, seconds, f"reads {other.version}", lambda p=python, o=other: read_other(p, o))
    return {version: (results[version], seconds[version]) for version in results}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, help="new folder for runs and logs; default: a temporary one")
    parser.add_argument("pythons", nargs="+", metavar="VERSION=PYTHON")
    args = parser.parse_args()
    runs = (args.runs or Path(tempfile.mkdtemp(prefix="pythons-"))).absolute()
    pairs = [word.split("=", 1) for word in args.pythons]
    rows = {version: (["no environment (see above)"], 0.0) for version, executable in pairs if executable == "none"}
    rows |= try_all([Python(version, executable, runs / version) for version, executable in pairs
                     if executable != "none"])
    others = len(rows) - 1
    print(f"{'Python':8}  {'seconds':>7}  result")
    for version, (failures, seconds) in rows.items():
        passed = "save, resume, generate, convert, consolidate, zero_to_fp32" + (
            f"; reads {others} other{'s' * (others > 1)}" if others else "")
        print(f"{version:8}  {seconds:7.0f}  {'ok: ' + passed if not failures else 'FAILED: ' + failures[0]}")
    failed = any(failures for failures, _ in rows.values())
    if failed:
        print(f"logs: {runs}")
    elif args.runs is None:
        shutil.rmtree(runs)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
