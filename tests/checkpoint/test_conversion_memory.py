"""Memory of import and export: at most the largest file plus one layer, however large the model is."""

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pretrain.checkpoint.convert.export_hf import export_hf
from pretrain.checkpoint.convert.plan_export import plan_export
from pretrain.model.config import ModelConfig
from tests.checkpoint.test_import import imported
from tests.support.hf_models import write_hf_model
from tests.support.own_memory import MemoryWatch

# gpt2: all matrices are transposed; gpt_neox: rows of queries, keys and values are reordered; llama: three matrices
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "n_embd": 1024, "n_head": 16, "n_layer": 2, "vocab_size": 4000},
    "gpt_neox": {"model_type": "gpt_neox", "hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 2,
                 "intermediate_size": 4096, "vocab_size": 2000},
}
LARGE: dict[str, dict[str, Any]] = {
    "gpt2": {**SIZES["gpt2"], "n_embd": 1280, "n_head": 20, "n_layer": 14, "vocab_size": 50257},
    "gpt_neox": {**SIZES["gpt_neox"], "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 12},
    "llama": {"model_type": "llama", "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4,
              "intermediate_size": 5632, "num_hidden_layers": 5, "vocab_size": 32000},
}


def _layer_bytes(config: ModelConfig) -> int:
    """Return the bytes of a block's weights in fp32."""
    return 4 * (config.num_parameters() - replace(config, num_layers=config.num_layers - 1).num_parameters())


def _check(folder: Path, values: dict[str, Any], shard_gb: float, at_least: float) -> None:
    size = write_hf_model(folder / "hf", values, shard_bytes=round(shard_gb * 1e9))
    assert size >= at_least
    with MemoryWatch() as importing:
        checkpoint = imported(folder / "hf", folder / "run")
    plan = plan_export(checkpoint, folder / "out", shard_gb=shard_gb)
    ctypes.CDLL(None).malloc_trim(0)  # otherwise the export could use blocks that the import freed
    with MemoryWatch() as exporting:
        export_hf(plan)
    largest, layer = max(path.stat().st_size for path in plan.out.glob("*.safetensors")), _layer_bytes(plan.config)
    for what, watch in (("import", importing), ("export", exporting)):
        used = watch.peak - watch.before
        print(f"{what} of {plan.config.architecture}: {used / 1e6:.0f} MB of memory; model {size / 1e6:.0f} MB, "
              f"largest file {largest / 1e6:.0f} MB, layer {layer / 1e6:.0f} MB")
        assert used <= largest + layer < size, what
    for path in (folder / "hf").glob("*.safetensors"):
        assert (plan.out / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", SIZES)
def test_memory_of_import_and_export(name: str, tmp_path: Path) -> None:
    _check(tmp_path, SIZES[name], shard_gb=0.02, at_least=1e8)


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_memory_of_import_and_export_of_a_large_model(name: str, tmp_path: Path) -> None:
    _check(tmp_path, LARGE[name], shard_gb=0.2, at_least=1e9)
