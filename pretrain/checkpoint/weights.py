"""The model's weights alone, whole, from a checkpoint of any layout, in one process."""

import contextlib
import io
import re
from pathlib import Path

import torch

from pretrain.errors import ConfigError
from pretrain.model.config import ModelConfig
from pretrain.model.specs import layer_names

_LAYER_FILE = re.compile(r"layer_(\d+)-.*model_states\.pt")


def load_weights(folder: Path, config: ModelConfig) -> dict[str, torch.Tensor]:
    """state_dict of `as_module(config)`: of the saved dtype, or fp32 where only ZeRO-3's fp32 shards hold them."""
    layer_files = {int(match.group(1)): path for path in folder.glob("layer_*")
                   if (match := _LAYER_FILE.fullmatch(path.name))}
    if layer_files:
        return _from_layer_files(layer_files, config)
    if (folder / "mp_rank_00_model_states.pt").is_file():
        # DeepSpeed's own file, with its configuration objects beside the tensors
        return torch.load(folder / "mp_rank_00_model_states.pt", map_location="cpu", weights_only=False)["module"]
    if list(folder.glob("zero_pp_rank_*_model_states.pt")):
        return _from_zero3(folder)
    raise ConfigError(str(folder), found="no model files", expected="a checkpoint folder that DeepSpeed wrote")


def _from_layer_files(files: dict[int, Path], config: ModelConfig) -> dict[str, torch.Tensor]:
    weights = {}
    for index, path in sorted(files.items()):
        layer = torch.load(path, map_location="cpu", weights_only=True)
        weights.update({f"{layer_names(config)[index]}.{name}": tensor for name, tensor in layer.items()})
    return weights


def _from_zero3(folder: Path) -> dict[str, torch.Tensor]:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with contextlib.redirect_stdout(io.StringIO()):  # it prints its progress
        return get_fp32_state_dict_from_zero_checkpoint(str(folder.parent), tag=folder.name)
