"""The tokenizer of the tests of the preparation."""

from tests.data.prepare.conftest import tokenizer

__all__ = ["tokenizer"]
