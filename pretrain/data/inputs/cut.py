"""Choose where to split a text."""


def text_cut(data: bytes) -> int:
    """Return where to split a text: after its last line, else before its last space, else before its last character."""
    cut = data.rfind(b"\n") + 1 or data.rfind(b" ")
    if cut > 0:
        return cut
    cut = len(data) - 1
    while cut > 0 and data[cut] & 0xC0 == 0x80:  # a UTF-8 continuation byte
        cut -= 1
    return cut or len(data)


def separator_cut(data: bytes, separator: bytes, size: int) -> int:
    """Return where to split a text with separators: after the last one in `size` bytes, else never inside one.

    `data` has up to len(separator) - 1 more bytes, which may belong to a separator that begins before.
    """
    *complete, last = data[:size].split(separator)
    if complete:
        return size - len(last)
    cut = text_cut(data[:size])
    inside = data.find(separator, max(0, cut - len(separator) + 1), cut + len(separator) - 1)
    return cut if inside < 0 or inside >= cut else inside
