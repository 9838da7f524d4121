"""Load the transformers model of a source on one device, or on several."""

from collections.abc import Sequence
from typing import Any

import psutil
import torch

from pretrain.analysis.transformers_model import DeviceMap, empty_model, load_model
from pretrain.cli import say
from pretrain.distributed.own_gpu import open_gpu, require_computing
from pretrain.distributed.world import ALONE
from pretrain.errors import ConfigError
from pretrain.extensions.generate.decode import LoadedModel
from pretrain.extensions.generate.source import USABLE_MEMORY, GenerationSource, choose_num_devices, require_accelerate


def load(source: GenerationSource, dtype: str, kind: str, *, num_devices: int | None, rows: int,
         positions: int) -> LoadedModel:
    """Load a model onto as few devices as hold it, or onto `num_devices`, with its tokenizer. Raises ConfigError.

    Args:
        kind: "cpu" or "cuda".
        rows, positions: number of texts that are generated together, and the tokens of the longest one.
    """
    if kind == "cuda":
        open_gpu(ALONE)
    model = empty_model(source, dtype)
    needed = memory_needed(model, rows=rows, positions=min(positions, source.max_positions))
    free = _free_memory(kind)
    count = choose_num_devices(needed, free, num_devices, f"{source.folder} ({dtype})")
    for index in range(count) if kind == "cuda" else ():
        require_computing(index)
    placement: torch.device | DeviceMap = torch.device("cuda", 0) if kind == "cuda" else torch.device(kind)
    if count > 1:
        placement = spread(model, free[:count])
    devices = f", spread over {count} devices" if count > 1 else ""
    say(f"{source.folder}: {sum(p.numel() for p in model.parameters()):,} parameters, {dtype} on {kind}{devices}")
    model = load_model(source, dtype, placement, model=model)
    end_tokens = {token for token in (source.tokenizer.eod_token, *source.end_tokens) if token is not None}
    unused = range(source.tokenizer.vocab_size, model.config.vocab_size)
    return LoadedModel(model, source.tokenizer, frozenset(end_tokens), tuple(unused))


def _free_memory(kind: str) -> list[int]:
    """Return the bytes of free memory of each device; for "cpu", of the host."""
    if kind == "cpu":
        return [psutil.virtual_memory().available]
    return [torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count())]


def memory_needed(model: Any, *, rows: int, positions: int) -> int:
    """Return the bytes of the model's weights and of the keys and values of `rows` texts of `positions` tokens."""
    config = model.config.get_text_config(decoder=True)
    attention_heads = getattr(config, "num_attention_heads", None) or 1  # models without attention keep less
    heads = getattr(config, "num_key_value_heads", None) or attention_heads
    head_size = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // attention_heads
    cached = 2 * getattr(config, "num_hidden_layers", 0) * heads * head_size * rows * positions
    return int((sum(parameter.numel() for parameter in model.parameters()) + cached) * model.dtype.itemsize)


def spread(model: Any, free: Sequence[int]) -> DeviceMap:
    """Return a device map that spreads the layers over the GPUs 0 to len(free) - 1, about evenly. Raises ConfigError.

    Args:
        model: the result of `empty_model`.
        free: bytes of free memory of each of these GPUs.
    """
    require_accelerate()
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    memory = {index: int(size * USABLE_MEMORY) for index, size in enumerate(free)}
    kept_together = list(model._no_split_modules or [])
    balanced = get_balanced_memory(model, max_memory=memory, no_split_module_classes=kept_together, dtype=model.dtype)
    found: DeviceMap = infer_auto_device_map(model, max_memory=balanced, no_split_module_classes=kept_together,
                                             dtype=model.dtype)
    if not set(found.values()) <= set(memory):
        raise ConfigError("--devices", problem=f"the layers cannot be spread over {len(free)} devices: at least one "
                          "layer does not fit", remedy="use more devices or a 16-bit --dtype")
    return found
