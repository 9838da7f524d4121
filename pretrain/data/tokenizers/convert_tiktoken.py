"""Convert a tiktoken file to a tokenizer of the tokenizers library, with transformers' converter."""

from typing import Any

from pretrain.data.tokenizers.convert_sentencepiece import json_bytes, to_bytes, tokenizer_config
from pretrain.data.tokenizers.tiktoken_file import TiktokenFile


def tiktoken_files(file: TiktokenFile, *, max_length: int | None = None) -> dict[str, bytes]:
    """Return tokenizer.json and tokenizer_config.json, by name."""
    library = convert_tiktoken(file)
    return {"tokenizer.json": to_bytes(library),
            "tokenizer_config.json": json_bytes(tokenizer_config(library, file.ids, max_length=max_length))}


def convert_tiktoken(file: TiktokenFile) -> Any:
    """Return a tokenizers.Tokenizer: byte-level BPE that first looks up a complete word, as tiktoken does."""
    from tokenizers import Tokenizer, models, normalizers
    from transformers.convert_slow_tokenizer import TikTokenConverter

    names = sorted(file.special_tokens, key=file.special_tokens.__getitem__)

    class Converter(TikTokenConverter):
        def load_tiktoken_bpe(self, tiktoken_url: str) -> dict[bytes, int]:
            return {text: token for token, text in file.texts.items()}

        def tokenizer(self) -> Any:
            vocab, merges = self.extract_vocab_merges_from_model("")
            # The library numbers added tokens itself, unless the vocabulary has them, and warns of unused numbers.
            vocab |= file.special_tokens
            unused = set(range(file.ids.vocab_size)) - set(vocab.values())
            vocab |= {f"<|unused_{token}|>": token for token in unused}
            return Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False, ignore_merges=True))

    library = Converter(pattern=file.encoding.export_pattern, extra_special_tokens=names).converted()
    if file.encoding.nfc:
        library.normalizer = normalizers.NFC()
    library.encode_special_tokens = True
    return library
