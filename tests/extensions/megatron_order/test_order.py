"""Flags of a run in these orders, and its resumes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pretrain.checkpoint.load.start import Start
from pretrain.data.data_spec import parse_data_spec
from pretrain.data.token_files.writer import IndexedWriter
from pretrain.errors import ConfigError
from tests.checkpoint.starts import start_run, write_checkpoint


@pytest.mark.parametrize(("flags", "message"), [
    ({"train_data": "a", "sample_order": "megatorn"}, 'Did you mean "megatron"'),
    ({"train_data": ["a", "b"], "sample_order": "neox"}, "--sample_order neox: GPT-NeoX does not divide the sources"),
    ({"train_data": ["a", "b"], "sample_order": "neox", "valid_data": "c"}, "and --split 969,30,1 takes documents"),
    ({"train_data": ["a", "b"], "sample_order": "megatron", "blend_schedule": "0:1,2"}, "has no schedule of weights"),
    ({"train_data": "a", "sample_order": "neox", "packing": "best_fit"}, "--sample_order neox has no packing")])
def test_wrong_flags_are_rejected(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_data_spec(**flags)


def test_another_order_is_rejected(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "web", np.uint16) as writer:
        for _ in range(20):
            writer.add_document(np.random.default_rng(0).integers(0, 250, 100))
        writer.finalize({"vocab_size": 256, "max_token": 249, "eod_token": 0, "tokenizer_sha256": "ab" * 32})

    def start(*flags: str) -> Start:
        return start_run(tmp_path / "run", "--train_data", str(tmp_path / "web"), "--seq_length", "16",
                         "--split", "80,20,0", *flags)

    write_checkpoint(start().plan)
    with pytest.raises(ConfigError, match="trained with --sample_order shuffled, and this run would use megatron"):
        start("--sample_order", "megatron")
    write_checkpoint(start("--sample_order", "megatron", "--allow_other_data").plan)
    assert start("--sample_order", "megatron").resume is not None
    with pytest.raises(ConfigError, match="global_step10 is part of a run of 50 samples, and this run has 60"):
        start("--sample_order", "megatron", "--train_steps", "60")
    with pytest.raises(ConfigError, match="--order_samples: found 1: an order of"):
        start("--sample_order", "neox", "--order_samples", "1", "--first_sample", "10000000", "--allow_other_data")
