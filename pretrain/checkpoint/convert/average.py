"""Average the fp32 weights of several checkpoints, of any layouts, into a checkpoint of weights alone.

Averages of the last checkpoints often have a lower loss than any of them (Izmailov et al., arXiv 1803.05407).
"""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from pretrain.checkpoint.convert.new_folder import check_free_space, new_folder
from pretrain.checkpoint.convert.plan_average import AveragedCheckpoint, AveragePlan
from pretrain.checkpoint.convert.weights_checkpoint import write_weights_checkpoint
from pretrain.checkpoint.convert.write_weights import CHUNK_NUMEL, PlannedTensor
from pretrain.checkpoint.format.manifest import Manifest, step_of
from pretrain.checkpoint.load.reader import FP32, CheckpointReader, chunks_of
from pretrain.checkpoint.save.finite import all_finite
from pretrain.data.tokenizers.tokenizer import TOKENIZER_FILES, Tokenizer
from pretrain.errors import ConfigError
from pretrain.monitor.environment import versions


def average(plan: AveragePlan) -> None:
    """Write the average as the checkpoint of step 0 of the new run folder `plan.out`, and the tokenizer next to it.

    If the name of `plan.out` is global_step0, write only this checkpoint. Raises ConfigError.
    """
    planned = [PlannedTensor(name, "fp32", parameter.shape) for name, parameter in plan.config.named_parameters()]
    readers = [_open(source, planned) for source in plan.sources]
    check_free_space(plan.out, sum(tensor.num_bytes for tensor in planned))
    with new_folder(plan.out) as temporary:
        checkpoint = temporary
        if step_of(plan.out) < 0:
            checkpoint = temporary / "checkpoints" / "global_step0"
            checkpoint.mkdir(parents=True)
            if plan.tokenizer is not None:
                _copy_tokenizer(plan.tokenizer, temporary / "tokenizer")
        chunks = _averaged_chunks(readers, [source.weight for source in plan.sources], planned)
        write_weights_checkpoint(checkpoint, planned, chunks, _manifest(plan), {})


def _open(source: AveragedCheckpoint, planned: Sequence[PlannedTensor]) -> CheckpointReader:
    """Return the reader of a checkpoint. Raises ConfigError if its parameters are not those of the model."""
    reader = CheckpointReader(source.folder)
    expected = {tensor.name: tensor.shape for tensor in planned}
    for name in expected.keys() | reader.shapes.keys():
        if reader.shapes.get(name) != expected.get(name):
            raise ConfigError(f"{source.folder}: {name}", found=f"shape {reader.shapes.get(name, 'none')}",
                              expected=f"{expected.get(name, 'none')}, as in the model of its manifest",
                              remedy="use another checkpoint")
    return reader


def _averaged_chunks(readers: Sequence[CheckpointReader], weights: Sequence[float],
                     planned: Sequence[PlannedTensor]) -> Iterator[torch.Tensor]:
    """Yield the average of each tensor in flat fp32 chunks, summed in fp64. The next chunk overwrites the last one."""
    size = min(CHUNK_NUMEL, max(tensor.num_elements for tensor in planned))
    values, sums = torch.empty(size), torch.empty(size, dtype=torch.float64)
    for tensor in planned:
        for start, length in chunks_of(tensor.num_elements, size):
            value, total = values[:length], sums[:length].zero_()
            for reader, weight in zip(readers, weights, strict=True):
                reader.copy(tensor.name, FP32, start, value)
                if not all_finite(value):
                    raise ConfigError(f"{reader.folder}: {tensor.name}",
                                      problem="it has values that are NaN or infinite",
                                      remedy="leave this checkpoint out")
                total.add_(value, alpha=weight)
            yield value.copy_(total)


def _copy_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Copy the files from which `load_tokenizer(folder)` loads the same tokenizer."""
    folder.mkdir()
    if tokenizer.path.suffix != ".json":
        shutil.copyfile(tokenizer.path, folder / "tokenizer.model")
        return
    main = tokenizer.path.name if tokenizer.path.name in TOKENIZER_FILES else "tokenizer.json"
    shutil.copyfile(tokenizer.path, folder / main)
    for name in TOKENIZER_FILES:  # special tokens, and the merges of a vocab.json
        if name not in (main, "tokenizer.json", "tokenizer.model") and tokenizer.path.with_name(name).is_file():
            shutil.copyfile(tokenizer.path.with_name(name), folder / name)


def _manifest(plan: AveragePlan) -> Manifest:
    """Return the manifest without files. Its data position and layout are empty, as in imported weights."""
    newest = plan.sources[-1].manifest
    return Manifest(
        step=0, consumed_samples=0, world_size=1, data_parallel_size=1, pipeline_stages=1, zero_stage=0,
        precision="fp32", grad_accum_dtype=None, offload_optimizer="none", offload_param="none", optimizer={},
        global_batch_size=0, seed=0, seq_length=newest.seq_length, model=newest.model, data_fingerprint="",
        tokenizer_fingerprint=newest.tokenizer_fingerprint, versions=versions(), finite=True, weights_only=True,
        origin=newest.origin, averaged=[source.record() for source in plan.sources])
