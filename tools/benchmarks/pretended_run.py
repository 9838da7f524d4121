"""The run folder of a pretended run of many ranks, with a checkpoint that has the shard indexes of GPT-3 175B."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pretrain.checkpoint.format.fragments import FileLocation, Fragment
from pretrain.checkpoint.format.hashed_files import FileRecord, sha256_of
from pretrain.checkpoint.format.manifest import MANIFEST, Manifest, manifest_of
from pretrain.checkpoint.format.shard_index import index_name, index_text, tensor_entry
from pretrain.checkpoint.load.start import check_start
from pretrain.config.flags.parse import parse_arguments
from pretrain.config.plan import Plan
from pretrain.distributed.device import cpu_device
from pretrain.model.config import load_model_config
from pretrain.model.hf_names import tensor_rules
from pretrain.model.parameters import Part
from tools.benchmarks.counting import Counts, PretendedRanks, count_files
from tools.benchmarks.processes import write_corpus

RANKS_PER_HOST = 8
STEP = 10  # of the checkpoint
_TENSOR_PARALLEL, _STAGES = 8, 8


@dataclass
class Ranks:
    """The run folder of a pretended run, and the ranks that are counted."""

    folder: Path
    size: int
    plan: Plan
    pretended: PretendedRanks
    counts: dict[int, Counts] = field(default_factory=dict)  # of the phase that runs now

    @property
    def sampled(self) -> list[int]:
        """Rank 0, the first rank of a host in the middle, and two other ranks."""
        return [0, self.size // 2 + RANKS_PER_HOST, self.size // 2 + 3, self.size - 1]

    @property
    def checkpoints(self) -> Path:
        return self.folder / "run" / "checkpoints"

    def each(self) -> Iterator[int]:
        """Yield the sampled ranks, and count what happens until the next one."""
        self.pretended.sent.clear()
        for rank in self.sampled:
            with self.pretended.as_rank(rank, self.counts[rank]), count_files(self.folder, self.counts[rank]):
                yield rank


def pretend(folder: Path, size: int) -> Ranks:
    """Create the run folder of a run of `size` ranks with a checkpoint, whose small files have the names of a real one.
    """
    config = folder / "deepspeed.json"
    config.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1,
                                  "zero_optimization": {"stage": 1}, "bf16": {"enabled": True},
                                  "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}))
    write_corpus(folder / "corpus", 256, 200_000)
    words = [f"--deepspeed_config={config}", "--model=tiny", "--model_overrides=vocab_size=256", "--train_steps=50",
             f"--save={folder / 'run'}", "--async_save", "--seq_length=64",
             f"--train_data={folder / 'corpus'}", "--split=1"]
    plan = check_start(parse_arguments(words), world_size=size, device=cpu_device()).plan
    ranks = Ranks(folder, size, plan, PretendedRanks(size))
    checkpoint = ranks.checkpoints / f"global_step{STEP}"
    checkpoint.mkdir(parents=True)
    _write_checkpoint(checkpoint, pretended_manifest(plan, STEP), index_texts(size))
    (folder / "run" / "run.json").write_text(json.dumps([_start_record(plan, size)]))
    return ranks


def pretended_manifest(plan: Plan, step: int, save_id: str = "id") -> Manifest:
    return manifest_of(plan, step=step, consumed_samples=step * plan.layout.global_batch_size, versions={},
                       save_id=save_id)


def _start_record(plan: Plan, size: int) -> dict[str, Any]:
    hosts = [{"host": f"host-{number:05d}", "cpu": "AMD EPYC 9654 96-Core Processor", "cores": 192, "ranks": 8,
              "memory_bytes": 2**40, "gpus": [{"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 85 * 10**9}] * 8}
             for number in range(size // RANKS_PER_HOST)]
    flags = json.loads(json.dumps(plan.args.values(), default=str))
    return {"first_step": 0, "flags": flags, "hosts": [each["host"] for each in hosts], "hardware": hosts,
            "data": {name: dataset.fingerprint for name, dataset in plan.datasets.items()}}


def files_of(rank: int) -> list[str]:
    return [f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", f"rng_state_rank_{rank:05d}.pt", index_name(rank)]


def _write_checkpoint(folder: Path, manifest: Manifest, texts: list[str]) -> None:
    template = folder / "template"
    torch.save({"tensor": torch.zeros(1)}, template)
    content, sha256 = template.read_bytes(), sha256_of(template)
    template.unlink()
    files = {}
    for rank, text in enumerate(texts):
        *pickles, index = files_of(rank)
        for name in pickles:
            (folder / name).write_bytes(content)
            files[name] = FileRecord(len(content), sha256)
        (folder / index).write_text(text)
        files[index] = FileRecord(len(text), sha256_of(folder / index))
    (folder / MANIFEST).write_text(replace(manifest, files=files).to_json())


def index_texts(size: int) -> list[str]:
    """Return the shard indexes of GPT-3 175B by rank: 8 stages x 8 tensor-parallel ranks, the rest data-parallel."""
    shapes = [(rule.ours, rule.shape) for rule in tensor_rules(load_model_config("gpt3-175b", None))]
    texts, data = [], max(size // (_STAGES * _TENSOR_PARALLEL), 1)
    for stage in range(min(_STAGES, size)):
        own = shapes[len(shapes) * stage // _STAGES:len(shapes) * (stage + 1) // _STAGES]
        for tensor in range(min(_TENSOR_PARALLEL, size // _STAGES or 1)):
            parts = [Part(shape, 0, ((shape[0] * tensor // _TENSOR_PARALLEL,
                                      shape[0] * (tensor + 1) // _TENSOR_PARALLEL),)) for _, shape in own]
            ends = np.cumsum([prod(part.local_shape) for part in parts])
            for rank in range(data):
                texts.append(_index_of_rank([name for name, _ in own], parts, ends, rank, data))
    return texts


def _index_of_rank(names: list[str], parts: list[Part], ends: np.ndarray, rank: int, data: int) -> str:
    """Return the index of a data-parallel rank: its fraction of the parameters that follow each other."""
    low, high = int(ends[-1]) * rank // data, int(ends[-1]) * (rank + 1) // data
    fragments = []
    for at in range(int(np.searchsorted(ends, low, "right")), int(np.searchsorted(ends, high, "left")) + 1):
        begin = int(ends[at - 1]) if at else 0
        start, stop = max(low, begin), min(high, int(ends[at]))
        fragments.append(Fragment(names[at], parts[at].shape, start - begin, stop - start, start - low, parts[at]))
    file = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    weights = FileLocation(file, ("optimizer_state_dict", "single_partition_of_fp32_groups", 0))
    states = FileLocation(file, ("optimizer_state_dict", "base_optimizer_state", "state", 0))
    groups = [{"lr": 6e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "initial_lr": 6e-5}] * 2
    return index_text("FusedAdam", groups, [tensor_entry(weights, states, fragments, scalars={"step": 10.0},
                                                         elementwise=("exp_avg", "exp_avg_sq"))])
