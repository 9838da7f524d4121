"""Sizes of a model that NVIDIA's tensor cores compute slowly, and the sizes to use instead. Imports no torch.

Sources: NVIDIA, "Matrix Multiplication Background User's Guide", section 2.2: products are fastest if all dimensions
are multiples of 16 bytes, on A100 of 128 bytes; section 3.1: a product is computed in tiles, here of 128 columns, and a
tile that is partly outside of the matrix takes as long as a complete one. PyTorch computes FlashAttention with heads of
32, 64, 96 ... 256 elements (aten/src/ATen/native/transformers/cuda/flash_attn/static_switch.h). Nothing here is
measured by this project: the notes count padding, and give published figures where there are any.
"""

from collections.abc import Iterator

from pretrain.model.description import ModelConfig

_READ_BYTES, _LINE_BYTES = 16, 128  # see section 2.2 of the guide
_TILE_COLUMNS = 128
_HEADS = 32  # FlashAttention computes heads in multiples of it
_GUIDE = "NVIDIA's matrix multiplication guide, section 2.2"
# GPT-2's vocabulary in nanoGPT, 50,257 padded to 50,304, as its author A. Karpathy reported: about 25% (2023-02-03),
# and about 4% in his lecture "Let's reproduce GPT-2" (2024).
_REPORTED = "nanoGPT's author reported steps that are 4% and 25% faster with 50,304 instead of 50,257"


def size_notes(model: ModelConfig, *, tensor_parallel_size: int, element_bytes: int) -> list[str]:
    """Note sizes of a tensor-parallel rank that are no multiples of 128 bytes, with the size to use and its gain.

    Args:
        element_bytes: of a parameter in the precision of the products.
    """
    small, large = _READ_BYTES // element_bytes, _LINE_BYTES // element_bytes
    notes = []
    for name, word, size, ranks in _sizes(model, tensor_parallel_size):
        own = -(-size // ranks)
        if size % (large * ranks) == 0:
            continue
        better = -(-size // (large * ranks)) * large * ranks
        where = f"{word} {size:,}" + (f" ({own:,} on each of {ranks} tensor-parallel ranks)" if ranks > 1 else "")
        aligned = size % (small * ranks) == 0
        change = f"{model.key(name)}={better}" + ("" if name == "vocab_size" else ", which makes it another model,")
        remedy = f"--model_overrides {change} is one"
        notes.append(f"{where} is no multiple of {large if aligned else small}: {remedy}. {_gain(name, own, aligned)}")
    if model.head_size % _HEADS and model.head_size < 256:
        computed = -(-model.head_size // _HEADS) * _HEADS
        notes.append(f"heads of {model.head_size} elements are no multiple of {_HEADS}: FlashAttention computes "
                     f"{computed}, {computed / model.head_size - 1:.0%} more. Another number of heads avoids that, and "
                     "makes it another model")
    return notes


def _sizes(model: ModelConfig, tensor_parallel_size: int) -> Iterator[tuple[str, str, int, int]]:
    """Yield (field, words, size, tensor-parallel ranks that divide it) of each dimension of the model's products."""
    yield "vocab_size", "vocabulary", model.vocab_size, tensor_parallel_size
    yield "hidden_size", "hidden size", model.hidden_size, 1
    if model.num_experts < 1 or model.dense_layers:
        yield "intermediate_size", "inner size", model.intermediate_size, tensor_parallel_size
    if model.num_experts:
        yield "moe_intermediate_size", "inner size of an expert", model.moe_intermediate_size, 1
        if model.shared_expert_size:
            yield "shared_expert_size", "inner size of the shared expert", model.shared_expert_size, 1


def _gain(name: str, own: int, aligned: bool) -> str:
    """Say what a multiple gains, and what this is based on."""
    tiles = -(-own // _TILE_COLUMNS)
    padding = tiles * _TILE_COLUMNS / own - 1
    padded = f"its {tiles:,} tiles of {_TILE_COLUMNS} columns already compute {tiles * _TILE_COLUMNS:,} " \
             f"({padding:.1%} padding)"
    if aligned:
        return f"Gain: at most a part of that padding: {padded}"
    reads = f"Gain: aligned reads ({_GUIDE}), hardly more work: {padded}"
    return f"{reads}; {_REPORTED}" if name == "vocab_size" else reads
