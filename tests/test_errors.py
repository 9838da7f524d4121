"""Suggestions for misspelt words. A word that resembles no known word gets no suggestion."""

import pytest

from pretrain.errors import closest

KNOWN = ("tiny", "gpt2", "comet", "stage", "bf16", "fp16", "lr", "overlap_comm", "train_batch_size",
         "cpu_checkpointing", "zero_optimization", "stage3_param_persistence_threshold")


@pytest.mark.parametrize(("word", "known", "meant"), [
    ("c", ["a", "b"], ""), ("tp", ["sp"], "sp"), ("node4", ["node1", "node2"], ""), ("node2", ["node1"], "node1"),
    ("nod2", ["node1", "node2"], "node2"), ("llama3-7b", ["llama2-7b", "llama3-8b"], ""),
])
def test_words_with_little_in_common_and_numbers_are_not_suggested(word: str, known: list[str], meant: str) -> None:
    assert closest(word, known) == meant


@pytest.mark.parametrize(("word", "meant"), [
    ("stge", "stage"), ("tiyn", "tiny"), ("lrr", "lr"), ("gtp2", "gpt2"), ("bfp16", "bf16"), ("FP16", "fp16"),
    ("zero_optimisation", "zero_optimization"), ("stage3_param_persitance_threshold", KNOWN[-1]),
    ("comm_overlap", "overlap_comm"), ("train_batch", "train_batch_size"), ("cpu_checkpoint", "cpu_checkpointing"),
    ("_comment", ""), ("gptj", ""), ("fp8", ""), ("monitor", ""), ("", ""),
])
def test_suggested_words(word: str, meant: str) -> None:
    assert closest(word, iter(KNOWN)) == meant
