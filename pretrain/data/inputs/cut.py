"""Choose the positions at which a text is divided."""


def text_cut(data: bytes) -> int:
    """Return the position to divide a text at: after the last line, else before the last space or character."""
    cut = data.rfind(b"\n") + 1 or data.rfind(b" ")
    if cut > 0:
        return cut
    cut = len(data) - 1
    while cut > 0 and data[cut] & 0xC0 == 0x80:  # a UTF-8 continuation byte
        cut -= 1
    return cut or len(data)


def separator_cut(data: bytes, separator: bytes, size: int) -> int:
    """Return the position to divide a text with separators at: after the last one in `size` bytes, else outside of all.

    `data` has up to len(separator) - 1 more bytes, which may belong to a separator that begins before.
    """
    *complete, last = data[:size].split(separator)
    if complete:
        return size - len(last)
    cut = text_cut(data[:size])
    inside = data.find(separator, max(0, cut - len(separator) + 1), cut + len(separator) - 1)
    return cut if inside < 0 or inside >= cut else inside
