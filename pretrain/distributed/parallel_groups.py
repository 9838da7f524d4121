"""The groups of ranks that share a model replica: tensor-, sequence- and expert-parallel ranks.

Ranks are numbered with the tensor-parallel ranks next to each other, then the sequence-parallel, data-parallel and
pipeline ranks: rank = ((pipeline * data_size + data) * sequence_size + sequence) * tensor_size + tensor. The same order
has DeepSpeed 0.19.8 in its PipeModelDataParallelTopology (runtime/pipe/topology.py).
"""

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class RankGroup:
    """Ranks that share something, and this rank's place among them."""

    size: int = 1
    rank: int = 0
    handle: dist.ProcessGroup | None = None  # None: a group of one rank, without communication


ALONE = RankGroup()


@dataclass(frozen=True)
class ParallelGroups:
    """This rank's groups inside a model replica."""

    tensor: RankGroup = ALONE  # share each matrix
    sequence: RankGroup = ALONE  # share each sequence (Ulysses)
    expert: RankGroup = ALONE  # share the experts


NO_GROUPS = ParallelGroups()


@dataclass(frozen=True)
class RankOrder:
    """Sizes of the axes along which the ranks are numbered."""

    pipeline: int = 1
    data: int = 1
    sequence: int = 1
    tensor: int = 1

    def _sizes(self) -> dict[str, int]:
        return {"pipeline": self.pipeline, "data": self.data, "sequence": self.sequence, "tensor": self.tensor}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the place of a rank on each axis."""
        found = {}
        for axis, size in reversed(self._sizes().items()):
            rank, found[axis] = divmod(rank, size)
        return dict(reversed(found.items()))

    def groups_along(self, axis: str) -> list[list[int]]:
        """Return all groups of ranks that differ only in their coordinate on `axis`."""
        sizes = self._sizes()
        names = list(sizes)
        step = 1
        for name in names[names.index(axis) + 1:]:
            step *= sizes[name]
        span, world_size = step * sizes[axis], self.pipeline * self.data * self.sequence * self.tensor
        return [list(range(start, start + span, step))
                for block in range(0, world_size, span) for start in range(block, block + step)]


def create_group(groups: list[list[int]]) -> RankGroup:
    """Create all process groups, and return the one of this rank; collective. The groups must cover all ranks once."""
    own, rank = ALONE, dist.get_rank()
    for ranks in groups:
        if len(ranks) == 1:
            continue
        handle = dist.new_group(ranks)
        if rank in ranks:
            own = RankGroup(len(ranks), ranks.index(rank), handle)
    return own
