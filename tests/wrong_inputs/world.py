"""Files for the wrong inputs: data, tokenizer, JSON, finished run and transformers folder, and damaged copies."""

import json
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.active_extensions import run_files
from pretrain.checkpoint.format.hashed_files import FileRecord
from pretrain.checkpoint.format.manifest import Manifest
from pretrain.checkpoint.load.hf_folder import header_bytes
from pretrain.data.token_files.writer import IndexedWriter
from pretrain.model.config import model_config_from
from pretrain.model.hf_names import tensor_rules
from tests.wrong_inputs.case import of_extensions
from tests.wrong_inputs.inputs import BASE


def make_world(folder: Path) -> None:
    """Write data, a tokenizer, a JSON and a finished run, and damaged copies of some of them."""
    rng = np.random.default_rng(0)
    for name, largest, meta in (
        ("corpus", 500, {"vocab_size": 512, "max_token": 499, "eod_token": 0, "tokenizer_sha256": "ab" * 32}),
        ("foreign", 500, None),
        ("few", 300, None),
        ("big", 500, {"vocab_size": 60000, "max_token": 59999}),
        ("big_foreign", 60000, None),
    ):
        with IndexedWriter(folder / name, np.uint16) as writer:
            for _ in range(100):
                walk = 1 + (rng.integers(largest) + rng.integers(1, 5, 199).cumsum()) % (largest - 1)
                walk[0] = largest - 1  # each other token depends on the one before it
                writer.add_document(np.append(walk, 0))
            writer.finalize(meta)
    (folder / "dynamic_rope.json").write_text(json.dumps({
        "model_type": "llama", "vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 32, "max_position_embeddings": 32, "rope_scaling": {"type": "dynamic", "factor": 4.0}}))
    with IndexedWriter(folder / "short", np.uint16) as writer:
        writer.add_document(rng.integers(0, 500, 40))
        writer.finalize()
    for name in ("truncated", "corrupt", "lonely"):
        for suffix in ("bin", "idx"):
            (folder / f"{name}.{suffix}").write_bytes((folder / f"corpus.{suffix}").read_bytes())
    (folder / "truncated.bin").write_bytes((folder / "corpus.bin").read_bytes()[:-2])
    (folder / "corrupt.idx").write_bytes(b"nonsense" + (folder / "corpus.idx").read_bytes()[8:])
    (folder / "lonely.bin").unlink()
    vocab = {"<|endoftext|>": 0, **{f"w{number}": number for number in range(1, 300)}}
    tokenizer = {"version": "1.0", "added_tokens": [],
                 "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w1"},
                 "normalizer": None, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
                 "truncation": None, "padding": None}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "file").write_text("a file")
    for name in run_files():
        (folder / f"run with {name}" / name).mkdir(parents=True)
    (folder / "run with checkpoints").mkdir()
    (folder / "run with checkpoints" / "checkpoints").write_text("a file")
    (folder / "broken.json").write_text('{"train_batch_size": 1\n "bf16": {}}')
    (folder / "twice.json").write_text('{"train_batch_size": 1,\n "train_batch_size": 2}')
    (folder / "list.json").write_text("[]")
    for module in of_extensions():
        if hasattr(module, "write_files"):
            module.write_files(folder)
    (folder / "nvme").mkdir()
    (folder / "ds.json").write_text(json.dumps(BASE))
    (folder / "target.yaml").write_text(f"deepspeed_config: {folder}/ds.json\nmodel: tiny\n"
                                        f"train_data: {folder}/corpus\nseq_length: 64\n"
                                        f"train_steps: 50\nsave: {folder}/run\n")
    (folder / "other.yml").write_text(json.dumps({  # of GPT-NeoX
        "num-layers": 2, "hidden-size": 64, "num-attention-heads": 2, "max-position-embeddings": 64, "train-iters": 10,
        "pos-emb": "rotary", "train_micro_batch_size_per_gpu": 1}))
    (folder / "text.txt").write_text("Some text. " * 50)
    for suffix in ("bin", "idx"):
        (folder / f"plain.{suffix}").write_bytes((folder / f"corpus.{suffix}").read_bytes())
    _make_run(folder / "done", str(folder))
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text(json.dumps(HF_MODEL))
    (folder / "hf" / "model.safetensors").write_bytes(safetensors_of(HF_MODEL))


HF_MODEL = {"model_type": "gpt2", "vocab_size": 320, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}


def safetensors_of(values: dict[str, Any]) -> bytes:
    """Return a safetensors file with the weights of a config.json, which are all 0."""
    tensors = [(name, "fp32", shape) for rule in tensor_rules(model_config_from(values, "config.json"))
               for name, shape in zip(rule.theirs, rule.their_shapes(), strict=True)]
    return header_bytes(tensors) + bytes(4 * sum(prod(shape) for _, _, shape in tensors))


def _make_run(run: Path, tokenizer: str) -> None:
    """Write a run with one checkpoint. It has only the files that the tools read before they import torch."""
    checkpoint = run / "checkpoints" / "global_step5"
    checkpoint.mkdir(parents=True)
    (checkpoint / "weights.pt").write_bytes(b"weights")
    manifest = Manifest(
        step=5, consumed_samples=5, world_size=1, data_parallel_size=1, pipeline_stages=1, zero_stage=1,
        precision="bf16", grad_accum_dtype=None, offload_optimizer="none", offload_param="none", optimizer={},
        global_batch_size=1, seed=1, seq_length=64, model={"model_type": "gpt2"}, data_fingerprint="",
        tokenizer_fingerprint=None, versions={}, files={"weights.pt": FileRecord(7, "ab" * 32)})
    (checkpoint / "manifest.json").write_text(manifest.to_json())
    (run / "run.json").write_text(json.dumps([{"flags": {"tokenizer": tokenizer}, "train_steps": 5}]))
    (run / "metrics.jsonl").write_text('{"step": 5, "loss": 1.0}\n')
