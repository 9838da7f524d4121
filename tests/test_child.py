"""Child processes import nothing from the working folder, except the user's own code."""

import ast
import functools
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pretrain.active_extensions import BUILT_IN_EXTENSIONS
from pretrain.checkpoint.save.background import WRITER_MODULE, BackgroundWriter
from pretrain.child import child_command
from pretrain.cluster.hosts.remote import DEFAULT_HEALTH_COMMAND, call_probe, local_transport
from pretrain.data.prepare.worker_pool import map_in_order
from pretrain.data.token_files.hashes import BackgroundHash
from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.distributed.process import PROGRAM, ROOT
from pretrain.memory.measure.measure_run import RANK_MODULE
from tests.data.prepare.test_worker_pool import make_square
from tests.support.cases import config, flags

SOURCES = [path for folder in ("pretrain", "tools", "launch") for path in sorted((ROOT / folder).rglob("*.py"))]
SCRIPTS = [*sorted((ROOT / "launch").glob("*.sh")), *sorted((ROOT / "launch/slurm").glob("*.sbatch"))]
PACKAGES = ("pretrain", "torch", "numpy", "deepspeed", "transformers", "yaml", "psutil", "sitecustomize",
            "usercustomize", "sentencepiece", "tokenizers", "fsspec", "ninja", "packaging")


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with modules that have the names of those of the standard library, and of packages.

    Each writes its name into a file when it is executed.
    """
    folder = tmp_path_factory.mktemp("hostile")
    source = f"open({str(folder / 'executed')!r}, 'a').write(__name__ + '\\n')\nraise ImportError('of the folder')\n"
    exist = {module.name for module in pkgutil.iter_modules()} | {*sys.builtin_module_names, "usercustomize"}
    for name in exist & {*sys.stdlib_module_names, *PACKAGES}:  # not winreg: own code may bring what is missing
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(source)
        (folder / f"{name}.py").write_text(source)
    return folder


@pytest.fixture
def hostile(modules: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Change into the folder of the modules, of which none must be executed."""
    monkeypatch.chdir(modules)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield modules
    executed = modules / "executed"
    assert not executed.exists(), executed.read_text()


def test_every_python_process_is_started_without_the_working_folder() -> None:
    """No source starts Python with -m; with -c, the working folder is removed first, or -I ignores it."""
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            where = f"{path}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.List):
                words = [each.value for each in node.elts if isinstance(each, ast.Constant)]
                source = ast.unparse(node)
                assert "-m" not in words or "python" not in source.replace("sys.executable", "python"), where
                if "-c" in words and "sys.executable" in source and "-I" not in words:
                    assert "WITHOUT_WORKING_FOLDER" in text, where
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in (
                    "get_context", "set_start_method"):
                assert [each.value for each in node.args if isinstance(each, ast.Constant)] == ["fork"], where
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("ProcessPoolExecutor"):
                assert any(each.arg == "mp_context" for each in node.keywords), where
    for path in SCRIPTS:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not line.startswith("#") and re.search(r"python|deepspeed", line):
                is_ours = re.search(r"(-m|--module) +pretrain|import pretrain|from pretrain", line)
                assert not is_ours or "cd / &&" in line, f"{path}:{number}: {line}"


def _children() -> list[str]:
    """Return the modules that are started by `child_command`."""
    constants = {"WRITER_MODULE": WRITER_MODULE, "RANK_MODULE": RANK_MODULE}
    words = {word for path in SOURCES for word in re.findall(r"child_command\(\s*(\"[\w.]+\"|[A-Z_]+)",
                                                             path.read_text(encoding="utf-8"))}
    return sorted(constants[word] if word in constants else word.strip('"') for word in words)


# those of extensions may import torch
@pytest.mark.parametrize("module", [
    pytest.param(name, marks=pytest.mark.slow if name.startswith(BUILT_IN_EXTENSIONS) else ()) for name in _children()])
@pytest.mark.parametrize("safe_path", ["", "1"])
def test_modules_are_those_of_this_package(module: str, safe_path: str, hostile: Path) -> None:
    """Without its arguments, each module fails after its imports."""
    done = subprocess.run(child_command(module), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          env={**os.environ, "PYTHONSAFEPATH": safe_path})
    assert str(hostile) not in done.stderr
    assert "ImportError" not in done.stderr, "this folder has no other names"
    assert str(ROOT) in done.stderr or done.returncode == 0, done.stderr


def test_all_children_are_known() -> None:
    assert len([name for name in _children() if not name.startswith(BUILT_IN_EXTENSIONS)]) >= 9


def test_processes_of_the_data_and_of_saves(hostile: Path, corpus: str, tmp_path: Path) -> None:
    process = BackgroundHash(IndexedDataset(corpus).file, first=0, num_blocks=1)
    writer = BackgroundWriter(tmp_path / "checkpoints", 0)
    assert not writer._ended
    writer.close()
    found = [result[0] for _, result in map_in_order(functools.partial(make_square, 0.0), iter(range(4)), 2)]
    assert found == [0, 1, 4, 9]
    digests: list[str] = []
    while not process.has_ended:
        digests += process.read()
        time.sleep(0.01)
    assert len([*digests, *process.read()]) == 1
    process.close()


def test_programs_for_hosts(hostile: Path) -> None:
    assert call_probe(local_transport, "here", "ranks_of_run", "find", str(hostile), []) == []
    subprocess.run(DEFAULT_HEALTH_COMMAND, shell=True, check=True)


def test_a_run_in_a_hostile_folder(hostile: Path, corpus: str, tmp_path: Path) -> None:
    train_in(hostile, corpus, tmp_path)


def train_in(hostile: Path, corpus: str, tmp_path: Path, **others: object) -> None:
    """Train: ranks, watchdog, background writer, hashes; the user's own code is found nevertheless."""
    (tmp_path / "ds.json").write_text(json.dumps(config(1, micro=2, accumulation=1)))
    shutil.copy(ROOT / "tests/support/own_data.py", hostile)
    words = {**flags(corpus, layers=1, steps=6), "deepspeed_config": tmp_path / "ds.json", "save": tmp_path / "run",
             "log_interval": 1, "save_interval": 3, "dataset_module": "own_data:build", **others}
    for name in ("train_data", "split"):
        del words[name]
    done = subprocess.run([sys.executable, PROGRAM, "--num_accelerators", "1", "--async_save",
                           *(f"--{key}={value}" for key, value in words.items())], capture_output=True, text=True,
                          env={**os.environ, "DS_ACCELERATOR": "cpu"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "run/checkpoints/global_step6/manifest.json").is_file()
    assert "warning" not in done.stderr
