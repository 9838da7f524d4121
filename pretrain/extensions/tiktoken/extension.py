"""Tokenizers of the tiktoken library: the declaration."""

from pretrain.extension import Extension

EXTENSION = Extension("tiktoken", "Reads files of ranks of the tiktoken library as tokenizers, such as cl100k_base.",
                      tokenizers="files:TiktokenFormat")
