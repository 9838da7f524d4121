"""Read the prompts of `ds-pretrain generate` from flags, a file or standard input. Imports no torch."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pretrain.data.text_inputs.chunk import ReadSettings
from pretrain.data.text_inputs.find import find_inputs
from pretrain.data.text_inputs.formats import read_all, says_jsonl
from pretrain.data.text_inputs.json_lines import text_of_json_line
from pretrain.data.text_inputs.text import check_unicode, decode_utf8
from pretrain.data.tokenizers.tokenizer import Tokenizer
from pretrain.errors import ConfigError

STDIN = "-"


@dataclass(frozen=True)
class Prompt:
    """A text to continue."""

    where: str  # its place, for messages: "--prompt", or file and line
    text: str  # empty: the model begins a new document


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt with its tokens."""

    prompt: Prompt
    tokens: list[int]
    max_new_tokens: int  # at most this many tokens can follow


def prompts_of_flags(texts: Sequence[str]) -> list[Prompt]:
    """Return the prompts of `--prompt`; without any, one empty prompt."""
    if len(texts) < 2:
        return [Prompt("--prompt", text) for text in texts or ("",)]
    return [Prompt(f"--prompt (number {number})", text) for number, text in enumerate(texts, 1)]


def read_prompt_file(path: str, *, jsonl_key: str) -> list[Prompt]:
    """Read one prompt per line. Blank lines hold no prompt.

    Args:
        path: a text file; a .jsonl file, with one object per line; either also gzipped (.gz); "-" for text from
            standard input.
        jsonl_key: key of the prompt in each object of a .jsonl file.

    Raises:
        ConfigError: the file cannot be read, is not UTF-8 or has no prompt, or a line is not such an object.
    """
    name = "standard input" if path == STDIN else path
    is_jsonl = says_jsonl(path)
    data = sys.stdin.buffer.read() if path == STDIN else _read_file(path, "jsonl" if is_jsonl else "text")
    prompts: list[Prompt] = []
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if line.strip():
            where = f"{name}:{number}"
            text = text_of_json_line(line, where, jsonl_key) if is_jsonl else decode_utf8(line, name, number)
            prompts.append(Prompt(where, text if is_jsonl else text.removesuffix("\r")))
    if not prompts:
        raise ConfigError(name, problem="there is no prompt", remedy="write one prompt per line")
    return prompts


def _read_file(path: str, kind: str) -> bytes:
    if Path(path).is_dir():
        raise ConfigError(path, problem="this is a folder", remedy="give a text or .jsonl file")
    found = find_inputs([path], ReadSettings(format=kind)).files[0]
    return read_all(found.path, found.compression, found.stored)


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer, *, max_positions: int,
                  leading: Sequence[int] = ()) -> EncodedPrompt:
    """Encode a prompt as data preparation encodes text.

    Args:
        prompt: an empty one becomes the end-of-document token, after which a new document begins.
        max_positions: number of positions of the model.
        leading: special tokens that come before each prompt.

    Raises:
        ConfigError: the prompt leaves no free position, or it is empty and the tokenizer has no such token.
    """
    check_unicode(prompt.text, prompt.where)
    tokens = [*leading, *tokenizer.encode(prompt.text)]
    if not tokens:
        if tokenizer.eod_token is None:
            raise ConfigError(prompt.where, problem="the prompt is empty, and the tokenizer has no end-of-document "
                              "token, with which a new document could begin", remedy="give a prompt")
        tokens = [tokenizer.eod_token]
    if len(tokens) >= max_positions:
        raise ConfigError(prompt.where, problem=f"the prompt has {len(tokens):,} tokens, and the model has "
                          f"{max_positions:,} positions", remedy=f"shorten it to at most {max_positions - 1:,} tokens")
    return EncodedPrompt(prompt, tokens, max_positions - len(tokens))


def note_on_length(prompts: Sequence[EncodedPrompt], max_new_tokens: int) -> str:
    """Return a note if prompts leave fewer than `max_new_tokens` positions; "" otherwise."""
    fewer = [prompt for prompt in prompts if prompt.max_new_tokens < max_new_tokens]
    if not fewer:
        return ""
    first = fewer[0]
    others = f" (and for {len(fewer) - 1} other prompts)" if len(fewer) > 1 else ""
    return (f"note: {first.prompt.where}: --max_new_tokens {max_new_tokens} is reduced to "
            f"{first.max_new_tokens}{others}: the model has {first.max_new_tokens + len(first.tokens)} positions, and "
            f"the prompt takes {len(first.tokens)}")
