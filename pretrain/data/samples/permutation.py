"""A keyed permutation of range(size) that is computed on demand, without a table."""

_FEISTEL_ROUNDS = 8
MASK_64 = (1 << 64) - 1


def mix(value: int) -> int:
    """Hash 64 bits to 64 bits with the finalizer of SplitMix64."""
    value = (value + 0x9E3779B97F4A7C15) & MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK_64
    return value ^ (value >> 31)


def permute(index: int, size: int, key: int) -> int:
    """Return the image of `index` under a keyed permutation of range(size): a Feistel network with O(1) memory.

    The network permutes range(4^k) with 4^k >= size. It is applied until the result lies in range(size).
    """
    assert 0 <= index < size
    half = max((size - 1).bit_length() + 1, 2) // 2
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for number in range(_FEISTEL_ROUNDS):
            left, right = right, left ^ (mix(key ^ mix(right * _FEISTEL_ROUNDS + number)) & mask)
        index = left << half | right
        if index < size:
            return index
