"""Numbers of tokens on the command line."""

from decimal import Decimal, InvalidOperation

_UNITS = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def parse_token_count(text: str) -> int | None:
    """Return a number of tokens, which may be written as 1e9 or 2.5B; None if it is not a whole number from 0 on.

    K, M, B and T are 10^3, 10^6, 10^9 and 10^12, in either case.
    """
    text = text.strip()
    return parse_whole_number(text[:-1], unit=_UNITS[text[-1].lower()]) if text[-1:].lower() in _UNITS else \
        parse_whole_number(text)


def parse_whole_number(text: str, *, unit: int = 1) -> int | None:
    """Return the number times `unit`. It may be written as 1e3. None if the product is not a whole number from 0 on."""
    try:
        value = Decimal(text) * unit
        return int(value) if 0 <= value < 2**63 and value == int(value) else None
    except (InvalidOperation, ValueError, OverflowError):  # Decimal compares no NaN, and int() takes no infinity
        return None
