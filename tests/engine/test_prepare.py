"""A run knows the CPU as py-cpuinfo does, and imports neither torch's compiler nor transformers."""

import json
import re
import subprocess
import sys
from pathlib import Path

import cpuinfo
import pytest
from deepspeed import ops
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.torch import build_shm_op
from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, ShareMemCommBuilder

from pretrain.engine import prepare
from tests.support.launch import ROOT
from tests.test_train import _environment, _flags

KEYS = ("arch", "vendor_id_raw")
FEATURES = {"avx2", "avx512", "avx512f", "sve"}  # what builder.py looks for


@pytest.fixture
def original(monkeypatch: pytest.MonkeyPatch) -> object:
    """Return the original function, which is restored after the test."""
    function = getattr(cpuinfo.get_cpu_info, "__wrapped__", cpuinfo.get_cpu_info)
    monkeypatch.setattr(cpuinfo, "get_cpu_info", function)
    return function


def test_features_are_those_of_py_cpuinfo(original: object) -> None:
    plain, flags = cpuinfo.get_cpu_info(), CPUAdamBuilder().cxx_args()
    prepare.read_features_from_proc()
    answer = cpuinfo.get_cpu_info()
    assert cpuinfo.get_cpu_info is not original
    assert {key: answer.get(key) for key in KEYS} == {key: plain.get(key) for key in KEYS}
    assert FEATURES & set(answer["flags"]) == FEATURES & set(plain["flags"])
    assert CPUAdamBuilder().cxx_args() == flags


ARM = "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd sve\nCPU implementer\t: 0x41\n"


@pytest.mark.parametrize(("machine", "text", "flag"), [("aarch64", ARM, "-D__SVE__"),
                                                       ("aarch64", ARM.replace("sve", ""), "-D__NEON__"),
                                                       ("x86_64", "flags\t\t: fpu avx2\n", "-D__AVX256__")])
def test_other_cpus(monkeypatch: pytest.MonkeyPatch, original: object, machine: str, text: str,
                    flag: str) -> None:
    monkeypatch.setattr(prepare, "proc_cpuinfo", lambda: text)
    monkeypatch.setattr(prepare.platform, "machine", lambda: machine)
    prepare._from_proc.cache_clear()
    prepare.read_features_from_proc()
    assert CPUAdamBuilder().simd_width() == flag
    prepare._from_proc.cache_clear()


def test_an_unknown_cpu_is_measured_once(monkeypatch: pytest.MonkeyPatch, original: object) -> None:
    calls: list[int] = []
    monkeypatch.setattr(cpuinfo, "get_cpu_info", lambda: calls.append(1) or {"arch": "riscv64", "flags": []})
    monkeypatch.setattr(prepare.platform, "machine", lambda: "riscv64")
    prepare._from_proc.cache_clear()
    prepare.read_features_from_proc()
    assert [CPUAdamBuilder().cpu_arch() for _ in range(2)] == ["-march=rv64gc"] * 2
    assert calls == [1]
    prepare._from_proc.cache_clear()


def test_the_process_group_examines_one_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed would run a compiler to examine the others."""
    monkeypatch.delitem(vars(ops), "__compatible_ops__", raising=False)
    monkeypatch.setattr(ops, "_probe_compatible_ops", lambda: pytest.fail("all operators are examined"), raising=False)
    monkeypatch.setattr(ShareMemCommBuilder, "load", lambda builder: "loaded")
    prepare.examine_one_operator()
    assert build_shm_op() == ("loaded" if get_accelerator().device_name() == "cpu" else None)


# Modules that take 0.1 s or more: torch's compiler, packages that DeepSpeed or torch may import with it, transformers.
CODE = """
import json, sys
from pretrain.train import main
code = main(sys.argv[1:])
slow = ("torch._dynamo", "torch._inductor.compile_fx", "torch.onnx", "sympy", "triton", "transformers", "tokenizers",
        "huggingface_hub", "datasets", "pandas", "scipy", "PIL", "IPython")
print(json.dumps([code, [name for name in slow if name in sys.modules]]))
"""


@pytest.mark.parametrize("optimizer", ["AdamW", "Muon"])
def test_training_imports_no_compiler_and_no_transformers(corpus: str, tmp_path: Path, optimizer: str) -> None:
    """On a CPU, Muon is not compiled either."""
    text = (ROOT / "ds_configs" / "zero1_bf16.json").read_text()
    params = '"type": "Muon",\n    "params": { "lr": "auto" }'
    text = text if optimizer == "AdamW" else re.sub(r'"type": "AdamW",\s*"params": \{.*\}', params, text)
    assert f'"{optimizer}"' in text
    (tmp_path / "ds.json").write_text(text)
    flags = _flags(corpus, tmp_path / "run", "--train_steps", "2", config=tmp_path / "ds.json")
    done = subprocess.run([sys.executable, "-c", CODE, *flags], env={**_environment(), "PYTHONPATH": str(ROOT)},
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [0, []]
