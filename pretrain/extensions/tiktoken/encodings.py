"""Encodings of the tiktoken library and of published models: what a file of ranks does not contain.

A file of ranks has the bytes of each token, and neither the pattern that divides a text into words nor the special
tokens. These facts are from tiktoken 0.14 (tiktoken_ext/openai_public.py), Meta's llama3/tokenizer.py and Qwen's
tokenization_qwen.py.
"""

from collections.abc import Callable
from dataclasses import dataclass

from pretrain.data.tokenizers.special_tokens import EOD_PIECE

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_GPT2_WORDS_FAST = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
_CL100K_WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                 r"|\s*[\r\n]+|\s+(?!\S)|\s+")
_CL100K_WORDS_FAST = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
                      r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s")
_QWEN_WORDS = _CL100K_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_O200K_WORDS = "|".join((
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"))
_FIM_NAMES = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
_SERVER = "https://openaipublic.blob.core.windows.net/encodings/"


@dataclass(frozen=True, kw_only=True)
class TiktokenEncoding:
    """Pattern and special tokens of an encoding, and its published file of ranks."""

    name: str
    pattern: str
    """with which tiktoken divides a text"""
    export_pattern: str
    """divides in the same way, without possessive quantifiers, which mean something else in the tokenizers library"""
    sha256: str = ""
    """of the published file; "": unknown"""
    num_ranks: int
    """tokens of the published file"""
    published_tokens: dict[str, int] | None = None
    """special tokens of the published file; None: those of `new_tokens`"""
    new_tokens: Callable[[], list[str]] = lambda: [EOD_PIECE]
    """special tokens that follow the ranks of any other file"""
    eod: str = EOD_PIECE
    bos: str | None = None
    nfc: bool = False
    """whether the published tokenizer applies Unicode's normal form C"""
    url: str = ""
    """of the published file; "": it cannot be downloaded by name"""

    def special_tokens(self, num_ranks: int, next_token: int) -> dict[str, int]:
        """Return the special tokens of a file of `num_ranks` tokens, whose largest token is `next_token` - 1."""
        if num_ranks == self.num_ranks and self.published_tokens is not None:
            return self.published_tokens
        return {name: next_token + number for number, name in enumerate(self.new_tokens())}


def _llama3_tokens() -> list[str]:
    """Return the names of Llama 3. Llama 3.1 gives other names to a few reserved tokens."""
    reserved = [f"<|reserved_special_token_{number}|>" for number in range(251)]
    return ["<|begin_of_text|>", "<|end_of_text|>", *reserved[:4], "<|start_header_id|>", "<|end_header_id|>",
            reserved[4], "<|eot_id|>", *reserved[5:]]


def _qwen_tokens() -> list[str]:
    return [EOD_PIECE, "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(205))]


ENCODINGS = {encoding.name: encoding for encoding in (
    TiktokenEncoding(
        name="r50k_base", pattern=_GPT2_WORDS_FAST, export_pattern=_GPT2_WORDS, num_ranks=50256,
        sha256="306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930",
        published_tokens={EOD_PIECE: 50256}, url=_SERVER + "r50k_base.tiktoken"),
    TiktokenEncoding(
        name="p50k_base", pattern=_GPT2_WORDS_FAST, export_pattern=_GPT2_WORDS, num_ranks=50280,
        sha256="94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069",
        published_tokens={EOD_PIECE: 50256}, url=_SERVER + "p50k_base.tiktoken"),
    TiktokenEncoding(
        name="cl100k_base", pattern=_CL100K_WORDS_FAST, export_pattern=_CL100K_WORDS, num_ranks=100256,
        sha256="223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
        published_tokens={EOD_PIECE: 100257, **dict(zip(_FIM_NAMES, range(100258, 100261), strict=True)),
                          "<|endofprompt|>": 100276}, url=_SERVER + "cl100k_base.tiktoken"),
    TiktokenEncoding(
        name="o200k_base", pattern=_O200K_WORDS, export_pattern=_O200K_WORDS, num_ranks=199998,
        sha256="446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
        published_tokens={EOD_PIECE: 199999, "<|endofprompt|>": 200018}, url=_SERVER + "o200k_base.tiktoken"),
    TiktokenEncoding(
        name="llama3", pattern=_CL100K_WORDS, export_pattern=_CL100K_WORDS, num_ranks=128000,
        sha256="82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55",
        new_tokens=_llama3_tokens, eod="<|end_of_text|>", bos="<|begin_of_text|>"),
    TiktokenEncoding(
        name="qwen", pattern=_QWEN_WORDS, export_pattern=_QWEN_WORDS, num_ranks=151643, new_tokens=_qwen_tokens,
        nfc=True),
)}
