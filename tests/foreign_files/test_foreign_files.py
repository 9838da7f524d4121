"""Foreign files are data: no hostile text in them is executed, connected to or written elsewhere."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from pretrain.checkpoint.save.retention import Rollback
from tests.foreign_files.commands import RUN_FLAGS, World
from tests.foreign_files.fuzz import SECRET
from tests.foreign_files.payloads import MODULE, dumped
from tests.foreign_files.sandbox import VARIABLE
from tests.support.launch import ROOT, train_ranks
from tests.wrong_inputs.world import make_world

Result = tuple[str, str, str, int, list[str]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of the sandbox: a run, its export, data, and things of a victim."""
    return make(tmp_path_factory.mktemp("world"))


def make(folder: Path) -> Path:
    for name in ("data", "victim/folder", "here", "home/.ssh", "out", "tmp", "cache", "data/bin"):
        (folder / name).mkdir(parents=True)
    make_world(folder / "data")
    (folder / "victim/secret.txt").write_text(json.dumps({"secret": SECRET}))
    (folder / "home/.bashrc").write_text("# of the victim\n")
    (folder / "data/bin/ds-pretrain").write_text("#!/bin/sh\n")
    (folder / "data/bin/ds-pretrain").chmod(0o755)
    train(folder, "run")
    code = f"import pathlib; pathlib.Path({str(folder / 'victim/imported')!r}).touch()\n"
    for place in ("here", "run"):
        (folder / place / f"{MODULE}.py").write_text(code)
    shutil.copytree(folder / "run", folder / "own")
    write_hf(folder)
    return folder


def write_hf(folder: Path) -> None:
    """Write a transformers folder with a tokenizer."""
    hf = Path(shutil.copytree(folder / "data/hf", folder / "hf"))
    shutil.copy(folder / "data/tokenizer.json", hf)
    weights = {"metadata": {"total_size": 4}, "weight_map": dict.fromkeys(("a", "b"), "model.safetensors")}
    for name, values in {
            "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>",
                                      "model_max_length": 16, "chat_template": "{{ messages }}"},
            "special_tokens_map.json": {"eos_token": "<|endoftext|>"}, "added_tokens.json": {"<|endoftext|>": 0},
            "generation_config.json": {"eos_token_id": 0, "max_length": 20, "transformers_version": "5.0"},
            "model.safetensors.index.json.off": weights}.items():
        (hf / name).write_text(json.dumps(values))


def train(folder: Path, name: str) -> None:
    """Train a run of one rank, with checkpoints and the files of extensions."""
    (folder / "data/own.json").write_text(json.dumps({
        "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}))
    flags = {"deepspeed_config": folder / "data/own.json", "model": "tiny",
             "model_overrides": "vocab_size=320,n_layer=1,n_embd=32", "train_data": folder / "data/few",
             "tokenizer": folder / "data/tokenizer.json", "seq_length": 32, "train_steps": 4, "save_interval": 2,
             "log_interval": 1, "eval_interval": 2, "eval_steps": 1, "note": "a note", **RUN_FLAGS,
             "save": folder / name}
    done = train_ranks(1, [f"--{name}={value}" for name, value in flags.items()], folder)
    assert done[0].returncode == 0, done[0].stdout
    run = folder / name
    World(folder).write_in_run()
    rollback = Rollback(time=1.0, reason="spike", bad_step=3, last_step=3, to_step=2, save_id="a", first_sample=1,
                        consumed_samples=2, abandoned={"global_step9": "b"})
    (run / "rollbacks.jsonl").write_text(dumped("x.jsonl", [asdict(rollback)]))
    restart = {"time": 1.0, "exit_code": 1, "reason": "crash", "host": "a"}
    (run / "restarts.jsonl").write_text(json.dumps(restart) + "\n")


def fuzz(world: Path, seed: int, count: int) -> list[Result]:
    """Run the fuzzer in a process of its own."""
    out = world.parent / "results"
    subprocess.run([sys.executable, "-m", "tests.foreign_files.fuzz", str(world), str(out), str(seed), str(count)],
                   cwd=ROOT, env=environ_of(world, settings_of(world)), check=True)
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def _cache() -> str:
    return os.environ.get("XDG_CACHE_HOME", f"{os.environ['HOME']}/.cache")


def settings_of(world: Path) -> dict[str, Any]:
    """Return what the sandbox allows: writing to some folders, compilers, and questions about the machine."""
    return {"log": str(world / "log"), "world": str(world),
            "writable": [*(str(world / name) for name in ("out", "tmp", "cache")), _cache(), "/dev/null", "/dev/shm/",
                         "/proc/self/"],
            "programs": ["sh -s ", "gcc ", "cc ", "c++ ", "/usr/bin/gcc", "/usr/bin/cc", "/usr/bin/c++", "nvidia-smi",
                         "git ", "/sbin/ldconfig", "ldconfig", "uname", "lscpu", "file -b ", "ninja "]}


def environ_of(world: Path, settings: dict[str, Any]) -> dict[str, str]:
    return {**os.environ, VARIABLE: json.dumps(settings), "HOME": str(world / "home"), "XDG_CACHE_HOME": _cache(),
            "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", f"{_cache()}/torch_extensions"),
            "HF_HOME": str(world / "cache/hf"), "TORCHINDUCTOR_CACHE_DIR": str(world / "cache/inductor"),
            "TMPDIR": str(world / "tmp"), "DS_ACCELERATOR": "cpu",
            "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def check(found: list[Result]) -> None:
    wrong = [each for each in found if each[4]]
    assert not wrong, f"{len(wrong)} of {len(found)}:\n" + "\n\n".join(map(str, wrong[:20]))
    refused = [each[:3] for each in found if each[1] == "unchanged" and each[3] != 0]
    assert not refused


def test_the_sandbox_sees_what_is_not_allowed(tmp_path: Path) -> None:
    """In a child that knows nothing of it."""
    settings = {"log": str(tmp_path / "log"), "world": str(tmp_path), "writable": [str(tmp_path / "out")],
                "programs": ["true"]}
    (tmp_path / "out").mkdir()
    (tmp_path / "code.py").write_text("import os\n")
    program = """if True:
        import contextlib, os, socket, subprocess, sys
        subprocess.run(["true"])
        open("out/allowed", "w").close()
        for function in (lambda: open("written", "w"), lambda: os.rename("out/allowed", "renamed"),
                         lambda: os.symlink("x", "link"), lambda: subprocess.run(["ls"]), lambda: os.system("ls"),
                         lambda: socket.create_connection(("foreign.invalid", 1), timeout=1),
                         lambda: exec(compile(open("code.py").read(), os.path.abspath("code.py"), "exec"))):
            with contextlib.suppress(OSError):
                function()
    """
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, env={
        **os.environ, VARIABLE: json.dumps(settings), "PYTHONPATH": str(ROOT / "tests/foreign_files/site")})
    found = [tuple(json.loads(line)[:2]) for line in (tmp_path / "log").read_text().splitlines()]
    assert found == [("write", str(tmp_path / "written")), ("write", str(tmp_path / "renamed")),
                     ("write", str(tmp_path / "link")), ("process", "subprocess.Popen: ls"),
                     ("process", "os.system: ls"), ("connection", "socket.getaddrinfo: foreign.invalid"),
                     ("code", str(tmp_path / "code.py"))]


def test_hostile_texts_and_links(world: Path) -> None:
    """About 500 commands, each on another hostile copy of a file."""
    check(fuzz(world, seed=0, count=8))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_many_hostile_texts_and_links(world: Path, seed: int) -> None:
    World(world).write_files_of_extensions()
    check(fuzz(world, seed=seed, count=60))
