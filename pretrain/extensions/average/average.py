"""Average the fp32 weights of several checkpoints, of any layouts, into a checkpoint of weights alone.

Averages of the last checkpoints often have a lower loss than any of them (Izmailov et al., arXiv 1803.05407).
"""

from collections.abc import Iterator, Sequence

import torch

from pretrain.checkpoint.convert.new_folder import check_free_space
from pretrain.checkpoint.convert.write_weights import CHUNK_NUMEL, PlannedTensor, weights_manifest, write_weights_run
from pretrain.checkpoint.format.shard_index import FP32
from pretrain.checkpoint.load.reader import CheckpointReader, all_finite, chunks_of
from pretrain.data.tokenizers.export_tokenizer import files_to_copy
from pretrain.errors import ConfigError
from pretrain.extensions.average.main import AveragedCheckpoint, AveragePlan
from pretrain.model.description import ModelConfig


def average(plan: AveragePlan) -> None:
    """Write the average as the checkpoint of step 0 of the new run folder `plan.out`, and the tokenizer next to it.

    If the name of `plan.out` is global_step0, write only this checkpoint. Raises ConfigError.
    """
    planned = [PlannedTensor(name, "fp32", parameter.shape) for name, parameter in plan.config.named_parameters()]
    readers = [_open(source, planned) for source in plan.sources]
    check_free_space(plan.out, sum(tensor.num_bytes for tensor in planned))
    newest = plan.sources[-1].manifest
    manifest = weights_manifest(
        precision="fp32", seq_length=newest.seq_length, model=newest.model, origin=newest.origin,
        tokenizer_fingerprint=newest.tokenizer_fingerprint, averaged=[source.record() for source in plan.sources])
    weights = [source.weight for source in plan.sources]
    chunks = _averaged_chunks(readers, weights, planned)
    write_weights_run(plan.out, planned, chunks, manifest, buffers=_averaged_buffers(readers, weights, plan.config),
                      tokenizer={} if plan.tokenizer is None else files_to_copy(plan.tokenizer))


def _open(source: AveragedCheckpoint, planned: Sequence[PlannedTensor]) -> CheckpointReader:
    """Return the reader of a checkpoint. Raises ConfigError if its parameters are not the model's."""
    reader = CheckpointReader(source.folder)
    reader.check_shapes({tensor.name: tensor.shape for tensor in planned})
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


def _averaged_buffers(readers: Sequence[CheckpointReader], weights: Sequence[float],
                      config: ModelConfig) -> dict[str, torch.Tensor]:
    """Return the averages of the model's buffers, such as the biases by which routers balance experts."""
    saved = [reader.buffers() for reader in readers] if any(config.named_buffers()) else []
    return {ours: sum((each[ours].double() * weight for each, weight in zip(saved, weights, strict=True)),
                      start=torch.zeros((), dtype=torch.float64)).float() for ours, _, _ in config.named_buffers()}
