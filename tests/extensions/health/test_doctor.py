"""`ds-pretrain doctor`: the rules of its table, and machines and hosts with faults."""

import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import threading
from copy import deepcopy
from importlib.metadata import files
from pathlib import Path
from typing import Any

import pytest

from pretrain.child import WITHOUT_WORKING_FOLDER
from pretrain.cluster.hosts.preflight import PreflightRequest
from pretrain.engine.build_ops import NOT_COMPILED, READY
from pretrain.extensions.health import facts, machine
from pretrain.extensions.health.doctor import THIS_HOST, Diagnosis, _evaluate, examine, page, report_clock
from pretrain.extensions.health.facts import FACTS, all_facts
from tests.cluster.workers.ssh_hosts import Hosts
from tests.support.launch import LIMIT_S, ROOT, free_port

_GPU = {"name": "NVIDIA H100", "memory.total": "81559", "memory.used": "4", "driver_version": "535.104.05",
        "compute_mode": "Default", "persistence_mode": "Enabled", "compute_cap": "9.0",
        "ecc.errors.uncorrected.volatile.total": "0", "remapped_rows.pending": "No", "remapped_rows.failure": "No"}
# a healthy host with two GPUs
_PARTS: dict[str, Any] = {
    "host": {"python": "3.11.2", "packages": {"numpy": "2.0"}, "code_digest": "a", "code_version": "1", "commit": None,
             "interface": None},
    "packages": [],
    "torch": {"version": "2.9.0", "cuda": "12.8", "gpus": 2, "problem": "", "architectures": ["sm_80", "sm_90"],
              "visible": None, "nccl": "2.27.3", "nccl_package": "2.27.3"},
    "gpus": {"devices": 2, "has_smi": True, "cuda": "12.2", "gpus": [_GPU, _GPU]},
    "deepspeed": {"version": "0.19.8", "operators": {"FusedAdam": READY, "CPUAdam": READY}, "untested": ""},
    "transformers": "5.0",
    "mpi": {"mpirun": "mpirun (Open MPI) 4.1.4", "library": "Open MPI v4.1.4", "problem": ""},
    "compilers": {"compiler": "c++ 12", "ninja": "1.11", "nvcc": "12.4", "any_nvcc": False, "python_header": True,
                  "missing_headers": []},
    "libraries": {"jemalloc": True, "libaio": True, "libaio_header": True},
    "cpu": {"model": "CPU", "cores": 8, "quota": None, "features": ["avx2", "amx_bf16"]},
    "memory": {"total": 2**35, "available": 2**34, "swap": 0, "swap_used": 0, "limit": None},
    "limits": {"open_files": 65536, "locked_bytes": None, "processes": None, "shm_bytes": 2**34,
               "shm_free_bytes": 2**34, "infiniband": 1},
    "disk TMPDIR": {"path": "/tmp", "free_bytes": 2**36, "problem": "", "rates": [1e9, 1e9]},
}


def _problems(changes: dict[str, Any]) -> list[str]:
    """Return the findings, and the notes in brackets, of a healthy host with changed values (part.key -> value)."""
    parts = deepcopy(_PARTS)
    for path, value in changes.items():
        part, _, key = path.partition(".")
        if key:
            parts[part][key] = value
        else:
            parts[part] = value
    found = [(rule, rule.problem(parts)) for fact in all_facts(parts) for rule in fact.rules]
    return [f"[{problem}]" if rule.is_note else problem for rule, problem in found if problem]


@pytest.mark.parametrize(("changes", "problem"), [
    ({}, None),
    ({"packages": ["torch 2.9 needs numpy<2, but 2.0 is installed"]}, "torch 2.9 needs numpy<2"),
    ({"torch.cuda": None, "torch.gpus": 0, "torch.architectures": []}, "torch is a build without CUDA"),
    ({"torch.cuda": "13.0", "compilers.nvcc": "13.0"}, "torch is built for CUDA 13.0, but the driver supports CUDA up"),
    ({"torch.gpus": 1}, "torch sees 1 of 2 GPUs"),
    ({"torch.gpus": 1, "torch.visible": "0"}, None),
    ({"torch.architectures": ["sm_70", "sm_100"]}, "torch has no kernels for GPUs of compute capability 9.0"),
    ({"torch.architectures": ["sm_70", "compute_80"]}, None),
    ({"torch.problem": "unknown error"}, "torch cannot use the GPUs: unknown error"),
    ({"torch.nccl": "2.20.5"}, "[NCCL 2.20.5 is loaded"),
    ({"gpus.has_smi": False, "gpus.gpus": []}, "there are NVIDIA devices, but no nvidia-smi"),
    ({"gpus.gpus": [_GPU], "torch.gpus": 1}, "nvidia-smi does not list all NVIDIA devices"),
    ({"gpus.gpus": [_GPU, {**_GPU, "ecc.errors.uncorrected.volatile.total": "2"}]}, "GPU 1: uncorrectable ECC errors"),
    ({"gpus.gpus": [{**_GPU, "remapped_rows.failure": "Yes"}, _GPU]}, "GPU 0: a faulty row of the memory cannot"),
    ({"gpus.gpus": [{**_GPU, "remapped_rows.pending": "Yes"}, _GPU]}, "GPU 0: a faulty row of the memory waits"),
    ({"gpus.gpus": [{**_GPU, "compute_mode": "Prohibited"}] * 2}, "GPU 0, 1: the compute mode"),
    ({"gpus.gpus": [{**_GPU, "persistence_mode": "Disabled"}, _GPU]}, "[GPU 0: persistence mode is off"),
    ({"gpus.gpus": [{**_GPU, "memory.used": "70000"}, _GPU]}, "[GPU 0: other programs use"),
    ({"gpus.gpus": [dict.fromkeys(_GPU, "[N/A]")] * 2}, None),
    ({"deepspeed.untested": "DeepSpeed 0.20 is outside"}, "[DeepSpeed 0.20 is outside"),
    ({"deepspeed.operators": {"FusedAdam": NOT_COMPILED}, "compilers.compiler": ""},
     "FusedAdam: not compiled yet, and there is no C++ compiler"),
    ({"deepspeed.operators": {"FusedAdam": NOT_COMPILED}}, "[FusedAdam: compiled by the first run"),
    ({"deepspeed.operators": {"AsyncIO": "needs libaio"}}, "[AsyncIO: needs libaio"),
    ({"compilers.nvcc": "11.8"}, "nvcc is of CUDA 11.8, but torch is built for CUDA 12.8"),
    ({"compilers.nvcc": "11.8", "compilers.any_nvcc": True}, None),
    ({"compilers.nvcc": ""}, "[no nvcc: AdamW is torch's"),
    ({"compilers.missing_headers": ["cublas_v2.h"]}, "[the toolkit of nvcc has no cublas_v2.h: AdamW is torch's"),
    ({"mpi.library": "MPICH Version: 4.0"}, "mpirun is 'mpirun (Open MPI) 4.1.4', but mpi4py loads"),
    ({"mpi.problem": "no libmpi", "mpi.library": ""}, "[mpi4py cannot be used: no libmpi"),
    ({"libraries.jemalloc": False}, None),
    ({"libraries.libaio_header": False}, "[no libaio"),
    ({"memory.available": 2**29}, "only 0.5 GiB of memory are available"),
    ({"memory.swap": 2**33, "memory.swap_used": 2**32}, "[4.0 GiB of swap are in use"),
    ({"limits.open_files": 256}, "the limit of open files is 256; expected at least 1,024"),
    ({"limits.open_files": 2048}, "[the limit of open files is 2,048"),
    ({"limits.processes": 100}, "the limit of processes and threads is 100"),
    ({"limits.locked_bytes": 2**16}, "locked memory is limited, on a host with InfiniBand"),
    ({"limits.locked_bytes": 2**16, "limits.infiniband": 0}, None),
    ({"limits.shm_free_bytes": 2**26}, "/dev/shm has only 64.0 MiB free"),
    ({"cpu.features": []}, "[no AVX2"),
    ({"disk TMPDIR.free_bytes": 0}, "/tmp: only 0.0 MiB are free"),
    ({"disk TMPDIR.rates": [1e6, 1e9]}, "/tmp: it is written with only 1.0 MB/s"),
    ({"disk TMPDIR.problem": "it cannot be written"}, "/tmp: it cannot be written"),
], ids=str)
def test_each_fault_is_one_finding_with_a_remedy(changes: dict[str, Any], problem: str | None) -> None:
    found = _problems(changes)
    assert len(found) == (problem is not None) or changes == {"cpu.features": []}, found
    assert problem is None or found[0].startswith(problem)


@pytest.mark.parametrize("part", [name for name in _PARTS if name != "host"])
def test_a_part_that_cannot_be_read_hides_no_other_row(part: str) -> None:
    """For example without a working nvidia-smi, on which the row of torch's GPUs depends."""
    parts = {name: value for name, value in _PARTS.items() if name != part}
    values = {fact.name: _evaluate(Diagnosis(), "host", fact, parts) for fact in all_facts(parts)}
    assert [name for name, value in values.items() if not value] in ([], ["network"])
    assert ("?" in values.values()) == (part != "packages" and not part.startswith("disk"))


def test_the_table_has_a_value_and_a_part_for_each_fact() -> None:
    assert all(fact.value(_PARTS) for fact in FACTS if fact.name != "network")
    assert {need for fact in FACTS for need in fact.needs} - {"host"} == facts.PARTS.keys() - {"disk"}
    remedies = [rule for fact in all_facts(_PARTS) for rule in fact.rules if not rule.remedy]
    assert len(remedies) == 1, "the warning about an untested DeepSpeed contains its remedy"


# ---- this machine


def _doctor(*words: str, before: str = "", **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run the doctor in a shell, after the command `before`."""
    command = f"{before} exec {shlex.join([sys.executable, '-m', 'pretrain', 'doctor', *words])}"
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(["sh", "-c", command], env=environ, capture_output=True, text=True, timeout=LIMIT_S)


def _write_script(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_a_healthy_machine(tmp_path: Path) -> None:
    done = _doctor("--save", str(tmp_path / "run"), "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0, report["findings"]
    assert report["ok"]
    found = report["hosts"][THIS_HOST]["facts"]
    assert "?" not in found.values()
    assert re.fullmatch(rf"{tmp_path}/run, write .* MB/s, read .* MB/s, .* free", found["--save"])
    assert not (tmp_path / "run").exists()


def test_faults_of_a_machine_are_lines_of_a_page(tmp_path: Path) -> None:
    """A module shadows torch, a GPU has errors, a limit is small, and folders cannot be written."""
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so: cannot open shared object file')\n")
    row = "NVIDIA H100, 81559, 4, 535.1, Default, Enabled, 9.0"
    _write_script(tmp_path / "bin" / "nvidia-smi",
                  f'case "$1" in *ecc*) echo "3, No, No";; --query*) echo "{row}";; *) echo "CUDA Version: 12";; esac')
    done = _doctor(before="ulimit -n 256;", PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}",
                   PYTHONPATH=f"{tmp_path}:{ROOT}", TORCH_EXTENSIONS_DIR="/proc/1", HF_HOME="/proc/1")
    assert done.returncode == 2, done.stdout + done.stderr
    assert all(len(line) <= 80 or len(line.split()[-1]) > 60 for line in done.stdout.splitlines())
    text = " ".join(done.stdout.split())
    assert re.search(r"BAD torch: ImportError: libcudart.so: .* \(\S+/torch.py:1\)\. Reinstall torch", text)
    assert "BAD GPUs: GPU 0: uncorrectable ECC errors of the memory. Reset the GPU" in text
    assert "BAD open files: the limit of open files is 256; expected at least 1,024. Raise it: ulimit" in text
    assert "BAD operator cache: /proc/1: it cannot be written" in text
    assert "Choose another folder with the variable TORCH_EXTENSIONS_DIR" in text
    assert "BAD deepspeed" not in text, "the same error of torch is reported once"


@pytest.mark.root
def test_a_full_dev_shm(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError\n")  # saves its import
    mount = f"mount -t tmpfs -o size=1m none /dev/shm; cd {tmp_path};"
    words = shlex.join([sys.executable, "-m", "pretrain", "doctor"])
    done = subprocess.run(["unshare", "--mount", "sh", "-c", f"{mount} exec {words}"], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}, timeout=LIMIT_S)
    assert done.returncode == 2, done.stderr
    assert "BAD   /dev/shm: /dev/shm has only 1.0 MiB free" in done.stdout


def test_a_driver_that_hangs_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts are read in the main thread, where Ctrl-C kills their processes."""
    threads, collect = list[threading.Thread](), machine.collect

    def recorded(task: dict[str, Any]) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return collect(task)

    monkeypatch.setattr(machine, "collect", recorded)
    _write_script(tmp_path / "nvidia-smi", "sleep 1000")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for part in facts.PARTS.keys() - {"gpus", "disk"}:
        monkeypatch.delitem(facts.PARTS, part)
    monkeypatch.setitem(facts.PARTS, "gpus", (1.0, "look for Xid errors"))
    diagnosis = examine({}, PreflightRequest(run=None, files=(), folder=tmp_path), None, {})
    (finding,) = diagnosis.findings
    assert (finding.problem, finding.remedy) == ("gpus: no answer within 1 s", "look for Xid errors")
    assert "GPUs           ?" in page(diagnosis)
    assert threads == [threading.main_thread()]


# ---- hosts


@pytest.mark.parametrize(("begin", "end", "text"), [
    (100.5, 104.0, None), (99.5, 105.5, None), (40.0, 44.0, "60.0 s behind"), (161.0, 165.0, "60.0 s ahead of")])
def test_clocks_are_compared_with_the_times_of_question_and_answer(begin: float, end: float, text: str | None) -> None:
    diagnosis = Diagnosis()
    report_clock(diagnosis, "b", {"asked": 100.0, "begin": begin, "end": end, "answered": 105.0})
    assert [text is not None and text in finding.problem for finding in diagnosis.findings] == [True] * bool(text)


def _on_hosts(hosts: Hosts, folder: Path, hostfile: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pretrain", "doctor", "--hostfile", str(hostfile), *words]
    return subprocess.run(command, env=hosts.environ, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)


@pytest.mark.root
def test_differences_of_hosts_are_findings(hosts: Hosts, tmp_path: Path) -> None:
    """On host B: another version of transformers, a broken torch, a wrong clock. A third host does not exist."""
    metadata = next(Path(str(file.locate())) for file in files("transformers") or () if file.name == "METADATA")
    other, broken, empty = tmp_path / "METADATA", tmp_path / "broken.py", tmp_path / "empty"
    other.write_text(re.sub(r"(?m)^Version: .*", "Version: 4.0.0", metadata.read_text(), count=1))
    broken.write_text("raise ImportError('libcudart.so')\n")
    empty.mkdir()
    torch = next(Path(str(file.locate())) for file in files("torch") or () if str(file) == "torch/__init__.py")
    (tmp_path / "run").mkdir()
    hostfile = hosts.hostfile(tmp_path / "hosts")
    absent = hosts.b.address.replace(".2", ".77")
    hostfile.write_text(hostfile.read_text() + f"{absent} slots=1\n")
    with hosts.b.bind(other, metadata), hosts.b.bind(broken, torch), hosts.b.bind(empty, tmp_path / "run"):
        done = _on_hosts(hosts, tmp_path, hostfile, "--save", "run", "--measure")
    assert done.returncode == 2, done.stdout + done.stderr
    text, b = " ".join(done.stdout.split()), hosts.b.address
    assert f"BAD {absent}: no answer: ssh failed" in text
    assert f"BAD {b}: transformers 4.0.0, but 5." in text
    assert f"BAD {b}: --save is a different folder on this host" in text
    assert f"BAD {b}: torch: ImportError: libcudart.so ({torch}:1). Reinstall torch" in text
    assert f"? ({b})" in text
    assert f"BAD {hosts.a.address}" not in text
    assert done.stdout.endswith("not measured: first repair the hosts\n")


@pytest.mark.root
@pytest.mark.slow
def test_two_healthy_hosts_are_measured(hosts: Hosts, tmp_path: Path) -> None:
    """The speed of this machine, and so the findings of the measurement, depend on its load."""
    done = _on_hosts(hosts, tmp_path, hosts.hostfile(tmp_path / "hosts"), "--master_port", str(free_port()),
                     "--measure", "--save", str(tmp_path / "run"))
    facts, _, measured = done.stdout.partition("Measuring with `ds-pretrain check-cluster`:")
    assert "no findings" in facts, done.stdout + done.stderr
    assert re.search(r"all-reduce of all 2 ranks: \S+ GB/s bus bandwidth", measured)
    assert done.returncode == (2 if "BAD " in measured else 0)


def test_parts_are_read_in_a_hostile_folder(hostile: Path) -> None:
    request = {"source": WITHOUT_WORKING_FOLDER + inspect.getsource(machine), "root": str(ROOT), "packages": ["json"],
               "folders": {}, "environ": {}, "limits_s": {"packages": 60.0, "disk": 60.0}}
    found = machine.collect(request)["parts"]["packages"]
    assert "error" not in found, found
