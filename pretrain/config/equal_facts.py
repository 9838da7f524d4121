"""Facts that all ranks of a run must share, as text by name: distributed/equal_ranks.py compares them at the start.

Paths may differ between hosts: what lies there is compared instead. Left out is what only one rank or one host uses,
and what the ranks choose or compare together later: checkpoints, and the weights of --init_from.
"""

import dataclasses
import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pretrain import __version__
from pretrain.active_extensions import extensions
from pretrain.cli import path_text
from pretrain.config.flags.arguments import FLAGS, RunArguments
from pretrain.config.plan import Plan
from pretrain.distributed.device import Device
from pretrain.distributed.requirements import requirements
from pretrain.distributed.world import World
from pretrain.extension import BUILT_IN

# flags of the core that one rank or one host uses
OWN_FLAGS = ("note", "trackio", "peak_tflops", "deepspeed_log_level", "local_rank", "nvme_path")
DATA_FLAGS = ("train_data", "valid_data", "test_data")  # paths, and weights, which the fingerprint of a blend has
_PATH_KEYS = ("output_path", "output_file", "nvme_path")  # of the JSON
# Variables that change results, or with which collectives of NCCL wait for each other. Those that limit the
# instructions of a CPU are left out: they make hosts with other CPUs equal.
VARIABLES = (
    "NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE", "NCCL_COLLNET_ENABLE", "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT",
    "PYTORCH_TUNABLEOP_ENABLED", "TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE", "TORCHINDUCTOR_MAX_AUTOTUNE",
    "TORCHINDUCTOR_EMULATE_PRECISION_CASTS", "ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE", "MKL_CBWR")


def common_facts(program: str, world: World, device: Device, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return what the ranks of any program must have in common: program, world size, packages, device, variables."""
    facts = {"program": program, "world size": world.size, "Python": platform.python_version(),
             **{each.name: _version(each.name) for each in requirements()}, "ds-pretrain": __version__,
             "code of ds-pretrain": code_digest(), "device": device.kind, "fp16 on the device": device.fp16,
             "compiled operators of DeepSpeed": device.compiles}
    return _texts({**facts, **{name: environ[name] for name in VARIABLES if name in environ}})


def run_facts(plan: Plan, program: str, world: World, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return what the ranks of a run must have in common: settings first, which explain differences in the rest."""
    common = common_facts(program, world, plan.device, environ)
    others = {f"extension {each.name}": each.digest() for each in extensions()
              if each.origin != BUILT_IN and each.is_used(plan.args)}
    return {**common, **flag_facts(plan.args), **_texts(others), **_texts(dict(_run_facts(plan)))}


def flag_facts(args: RunArguments) -> dict[str, str]:
    """Return the flags that must be equal; of those that name a path, whether they are given."""
    facts: dict[str, Any] = {}
    for name, flag in FLAGS.items():
        value = args.value(name)
        if name in DATA_FLAGS or flag.parse is path_text:
            value = "given" if value else None
        if name not in OWN_FLAGS and not flag.of_host and not flag.group.not_recorded and not flag.is_secret:
            facts[f"--{name}"] = value
    return _texts(facts)


def _run_facts(plan: Plan) -> Iterator[tuple[str, Any]]:
    for key, value in _flat(plan.ds_config):
        if not key.endswith(_PATH_KEYS):
            yield f"DeepSpeed JSON, {key}", value
    for key, value in _flat(plan.model.hf_config):
        yield f"config.json of the model, {key}", value
    for name in ("model", "model_code", "dataset_module"):
        module = sys.modules.get(str(getattr(plan.args, name) or "").partition(":")[0])
        if module is not None and getattr(module, "__file__", None):
            yield f"code of --{name}", hashlib.sha256(Path(str(module.__file__)).read_bytes()).hexdigest()[:12]
    for name, dataset in plan.datasets.items():
        yield f"fingerprint of the {name} data", dataset.fingerprint[:12]
    yield "fingerprint of --tokenizer", plan.tokenizer.fingerprint[:12] if plan.tokenizer is not None else None
    yield "end-of-document token", plan.eod_token


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of nested dicts."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the values as JSON, without those that are None."""
    return {name: json.dumps(value, default=_encode, sort_keys=True) for name, value in values.items()
            if value is not None}


def _encode(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else str(value)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def code_digest() -> str:
    """Return a hash of the names and sizes of this package's files, which takes no reading of them."""
    root = Path(__file__).resolve().parents[1]
    sizes = sorted((str(path.relative_to(root)), path.stat().st_size) for path in root.rglob("*.py"))
    return hashlib.sha256(json.dumps(sizes).encode()).hexdigest()[:12]
