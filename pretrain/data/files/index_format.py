"""The format of token files: pairs of `.bin` and `.idx`, byte-compatible with Megatron-LM and GPT-NeoX.

`.bin` holds only the tokens. `.idx` (little-endian): `MMIDIDX\\0\\0` | u64 version 1 | u8 dtype code |
u64 number of sequences | u64 length of the document index (documents + 1) | int32 lengths | int64 byte offsets |
int64 document index (first sequence of each document, from 0, and the number of sequences at the end).
"""

import struct
from typing import Any

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, Any] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
LENGTH_DTYPE, OFFSET_DTYPE = np.dtype("<i4"), np.dtype("<i8")  # of lengths; of byte offsets and the document index
REWRITE = "write it again with tools/prepare_data.py"
_LARGEST_UINT16_VOCAB = 65_499  # limit in Megatron-LM and GPT-NeoX, which infer the dtype from the vocabulary


def dtype_for_vocab(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype that Megatron-LM and GPT-NeoX infer for a vocabulary: uint16 up to 65,499, otherwise int32."""
    return np.dtype(np.uint16 if vocab_size <= _LARGEST_UINT16_VOCAB else np.int32)
