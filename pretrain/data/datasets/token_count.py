"""Numbers of tokens on the command line."""


def parse_token_count(text: str) -> int | None:
    """Return a number of tokens, which may be written as 1e9; None if the text is not a whole number from 0 on."""
    try:
        value = int(text) if text.strip().isdecimal() else float(text)
        return int(value) if value == int(value) and 0 <= value < 2**63 else None
    except (ValueError, OverflowError):  # int() of NaN or infinity, too
        return None
