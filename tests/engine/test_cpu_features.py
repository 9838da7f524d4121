"""The answer of read_features_from_proc is py-cpuinfo's answer, for all that DeepSpeed asks."""

import cpuinfo
import pytest
from deepspeed.ops.op_builder.cpu import CPUAdamBuilder

from pretrain.patches import cpu_features

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
    cpu_features.read_features_from_proc()
    answer = cpuinfo.get_cpu_info()
    assert cpuinfo.get_cpu_info is not original
    assert {key: answer.get(key) for key in KEYS} == {key: plain.get(key) for key in KEYS}
    assert FEATURES & set(answer["flags"]) == FEATURES & set(plain["flags"])
    assert CPUAdamBuilder().cxx_args() == flags


ARM = "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd sve\nCPU implementer\t: 0x41\n"


@pytest.mark.parametrize(("machine", "text", "flag"), [("aarch64", ARM, "-D__SVE__"),
                                                       ("aarch64", ARM.replace("sve", ""), "-D__NEON__"),
                                                       ("x86_64", "flags\t\t: fpu avx2\n", "-D__AVX256__")])
def test_other_cpus(monkeypatch: pytest.MonkeyPatch, tmp_path, original: object, machine: str, text: str,
                    flag: str) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(cpu_features, "_PROC_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(cpu_features.platform, "machine", lambda: machine)
    cpu_features._from_proc.cache_clear()
    cpu_features.read_features_from_proc()
    assert CPUAdamBuilder().simd_width() == flag
    cpu_features._from_proc.cache_clear()


def test_an_unknown_cpu_is_measured_once(monkeypatch: pytest.MonkeyPatch, original: object) -> None:
    calls: list[int] = []
    monkeypatch.setattr(cpuinfo, "get_cpu_info", lambda: calls.append(1) or {"arch": "riscv64", "flags": []})
    monkeypatch.setattr(cpu_features.platform, "machine", lambda: "riscv64")
    cpu_features._from_proc.cache_clear()
    cpu_features.read_features_from_proc()
    assert [CPUAdamBuilder().cpu_arch() for _ in range(2)] == ["-march=rv64gc"] * 2
    assert calls == [1]
    cpu_features._from_proc.cache_clear()
