"""Compute a micro-batch of each data-parallel rank again on the next one, and compare all results bit by bit.

A device that computes wrongly now and then, or always in the same way, shows in no other check: its gradients enter the
sum of all ranks, so that the copies of the parameters remain equal.
"""

import math
import os
import socket
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.engine import PipelineEngine

from pretrain.callback import Callback, Run
from pretrain.checkpoint.format.run_checkpoints import checkpoint_folders, step_of
from pretrain.config.plan import Plan
from pretrain.data.loader import MicroBatch
from pretrain.distributed.collectives import gather
from pretrain.distributed.device import cpu_name
from pretrain.engine.update import RECOMPUTATION
from pretrain.errors import CorruptionError
from pretrain.extensions.replay.first_micro_batch import BACKWARD, Captured, FirstMicroBatch, Place
from pretrain.resilience.replicas import list_ranks

FLAKY, WRONG, UNDECIDED = "flaky", "wrong", "undecided"
Sums = tuple[int, ...]


@dataclass(frozen=True)
class RankSums:
    """The checksums of one rank."""

    rank: int
    host: str
    stage: int  # pipeline stage
    unit: int  # number of the group of ranks that computes a micro-batch together, in the ring of these groups
    places: Sequence[Place]
    sums: Sequence[tuple[int, Sums]]  # (unit whose micro-batch it was, checksums) of each computation


@dataclass(frozen=True)
class Finding:
    """Findings from the checksums."""

    kind: str  # FLAKY: a rank disagrees with itself. WRONG: the majority differs. UNDECIDED: no majority
    ranks: list[int]
    place: Place  # the first one that differs
    text: str


@dataclass(frozen=True)
class _Results:
    """The results of a unit for one micro-batch: of each computation, the checksums of its ranks in rank order."""

    ranks: list[RankSums]
    outcomes: list[tuple[Sums, ...]]


def find_wrong_ranks(gathered: Sequence[RankSums]) -> Finding | None:
    """Return what differs, or None. A rank that disagrees with itself is named before others."""
    found = [finding for stage in sorted({each.stage for each in gathered})
             for source in sorted({each.unit for each in gathered if each.stage == stage})
             if (finding := _compare([each for each in gathered if each.stage == stage], source)) is not None]
    return min(found, key=lambda finding: (FLAKY, WRONG, UNDECIDED).index(finding.kind), default=None)


def _compare(gathered: Sequence[RankSums], source: int) -> Finding | None:
    """Compare all computations of the micro-batch of unit `source`, in one pipeline stage."""
    results = {unit: _results_of([each for each in gathered if each.unit == unit], source)
               for unit in sorted({each.unit for each in gathered})}
    results = {unit: each for unit, each in results.items() if each.outcomes}
    hosts = {each.rank: each.host for each in gathered}
    for each in results.values():
        other = next((outcome for outcome in each.outcomes if outcome != each.outcomes[0]), None)
        if other is not None:
            ranks, place = _first_difference(each.ranks, each.outcomes[0], other)
            return Finding(FLAKY, ranks, place, f"{list_ranks(ranks, hosts)} computed the same micro-batch twice with "
                           f"different results, first in {_describe(place)}")
    votes = Counter(each.outcomes[0] for each in results.values())
    if len(votes) < 2:
        return None
    (right, count), (_, next_count) = votes.most_common(2)
    wrong = [each for each in results.values() if each.outcomes[0] != right]
    ranks, place = _first_difference(wrong[0].ranks, wrong[0].outcomes[0], right)
    if count > next_count:
        return Finding(WRONG, ranks, place, f"{list_ranks(ranks, hosts)} computed a micro-batch with another result "
                       f"than {count} others, which agree: first in {_describe(place)}")
    ranks = sorted(rank.rank for each in results.values() for rank in each.ranks)
    return Finding(UNDECIDED, ranks, place, f"{list_ranks(ranks, hosts)} computed the same micro-batch with different "
                   f"results, first in {_describe(place)}; each repeats its own, so that one of them computes wrongly "
                   "each time, and only a third data-parallel rank could decide which")


def _results_of(ranks: Sequence[RankSums], source: int) -> _Results:
    by_rank = [[sums for unit, sums in each.sums if unit == source] for each in sorted(ranks, key=lambda x: x.rank)]
    return _Results(sorted(ranks, key=lambda each: each.rank), list(zip(*by_rank, strict=True)))


def _first_difference(ranks: Sequence[RankSums], found: Iterable[Sums],
                      expected: Iterable[Sums]) -> tuple[list[int], Place]:
    """Return the place that differs first, and the ranks of the unit whose checksums differ there."""
    first = {each.rank: min((index for index, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]),
                            default=len(a))
             for each, a, b in zip(ranks, found, expected, strict=True)}
    index = min(first.values())
    return [rank for rank, at in first.items() if at == index], ranks[0].places[index]


def _describe(place: Place) -> str:
    direction = "backward" if place.direction == BACKWARD else "forward"
    return f"the {direction} pass of {place.layer}, in {place.value}"


class Recomputation(Callback):
    """Compares the results of devices every --recompute_interval steps, before the update; collective.

    In its first step, each rank also computes its own micro-batch a second time. If the results differ then, an
    operator may not be deterministic: without --deterministic, a GPU's ranks make no more comparisons.
    """

    order = RECOMPUTATION

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._step, self._is_due, self._compared_step = 0, False, -1

    def start(self, run: Run) -> None:
        self._folder, self._screen = run.folder, run.screen
        self._repeats_bits = run.plan.device.kind == "cpu" or run.plan.args.deterministic
        self._micro_batch = FirstMicroBatch(run.engine)
        self._ring = _Ring(run.plan, run.engine)
        if not self._ring.is_uniform:
            run.screen.line("warning: --recompute_interval: the ranks have different devices or versions, whose "
                            "results may differ in the last bits: each rank compares with itself only, which finds "
                            "devices whose results vary")

    def before_step(self, run: Run, micro_batches: list[MicroBatch]) -> None:
        """Prepare the comparison if it is due in this step: also in the first one, and before a save."""
        self._step, is_saved = run.step, run.is_due(run.plan.args.save_interval)
        self._is_due = self._interval > 0 and (run.step % self._interval == 0 or is_saved or self._compared_step < 0)
        if self._is_due:
            self._micro_batch.watch()

    def before_update(self) -> None:
        """Compare, before the update. Raises CorruptionError, which names the rank, on all ranks."""
        if not self._is_due:
            return
        self._is_due = False
        own = self._micro_batch.take()
        computed = [(self._ring.unit, own.sums)]
        shifts = {self._ring.shift(1): None} | ({0: None} if self._compared_step < 0 else {})
        if self._differs([self._compute(own, shift, computed) for shift in shifts]):
            for shift in (0, 1, 2):  # who disagrees with itself, and what does a third rank find?
                self._compute(own, self._ring.shift(shift), computed)
            self._report(computed)
        self._compared_step = self._step

    def _compute(self, own: Captured, shift: int, computed: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
        """Compute the micro-batch of the unit `shift` places before in the ring. Returns whether its results differ."""
        given = self._ring.exchange(own, shift)
        sums = self._micro_batch.compute(given)
        computed.append(((self._ring.unit - shift) % self._ring.size, sums))
        return (sums != given.sums).any()

    def _differs(self, found: list[torch.Tensor]) -> bool:
        """Return whether there is a difference on any rank. The only value that the host reads."""
        differs = torch.stack(found).any().to(torch.int32)
        dist.all_reduce(differs, dist.ReduceOp.MAX)
        return bool(differs.item())

    def _report(self, computed: list[tuple[int, torch.Tensor]]) -> None:
        ring = self._ring
        gathered = gather(RankSums(dist.get_rank(), socket.gethostname(), ring.stage, ring.unit,
                                   self._micro_batch.places, [(unit, (*sums.tolist(),)) for unit, sums in computed]))
        finding = find_wrong_ranks(gathered)
        assert finding is not None
        if finding.kind == FLAKY and not self._repeats_bits:
            self._interval = 0
            self._event(finding, "off")
            self._screen.line(f"warning: step {self._step}: {finding.text}. An operator may not be deterministic, or "
                              "the device is faulty: --recompute_interval compares no more in this start. With "
                              "--deterministic, all operators are deterministic")
            return
        self._event(finding, finding.kind)
        raise CorruptionError(f"step {self._step}: {finding.text}. The update of this step was not made. "
                              f"{self._remedy(finding)}")

    def _event(self, finding: Finding, kind: str) -> None:
        place, hosts = finding.place, gather(socket.gethostname())
        self._folder.event("recomputation", step=self._step, reason=finding.text, finding=kind, ranks=finding.ranks,
                           hosts=[hosts[rank] for rank in finding.ranks], layer=place.layer, direction=place.direction,
                           value=place.value)

    def _remedy(self, finding: Finding) -> str:
        """Say which checkpoints may be wrong, and what to do."""
        again = "start the run again; if this happens twice on a host, replace the host"
        if finding.kind == UNDECIDED:
            again = "start the run again, on other hosts if it happens again"
        if self._compared_step < 0:
            return f"Nothing was compared before in this start: {again}"
        later = [path.name for path in checkpoint_folders(self._folder.path / "checkpoints")
                 if step_of(path) > self._compared_step]
        if later:
            return (f"The results were last equal in step {self._compared_step}, and {', '.join(later)} was saved "
                    f"since: remove it, and {again}")
        return f"Nothing was saved since step {self._compared_step}, when the results were last equal: {again}"


class _Ring:
    """The groups of ranks ("units") that compute micro-batches: in each, the ranks that share a model's layers.

    Units are neighbors if they have neighboring samples. With pipeline stages, each stage has a ring of its own.
    """

    def __init__(self, plan: Plan, engine: DeepSpeedEngine) -> None:
        layout = plan.layout
        self._group, self._device = engine.data_parallel_group, engine.device
        self._peers = dist.get_process_group_ranks(self._group) if self._group is not None else \
            list(range(dist.get_world_size()))
        # neighboring ranks share the experts, so that a micro-batch moves over all of them
        shards = layout.tensor_parallel_size * layout.sequence_parallel_size
        self._stride = math.lcm(layout.expert_parallel_size, shards) // shards
        self._position = self._peers.index(dist.get_rank())
        self.stage = engine.stage_id if isinstance(engine, PipelineEngine) else 0
        self.is_uniform = len(set(gather(_hardware()))) == 1
        self.unit, self.size = self._position // self._stride, max(1, len(self._peers) // self._stride)

    def shift(self, wanted: int) -> int:
        """Return the distance in the ring that is possible: 0, the same ranks, if there are no other equal ones."""
        return wanted % self.size if self.is_uniform else 0

    def exchange(self, own: Captured, shift: int) -> Captured:
        """Send this rank's micro-batch `shift` units on, and return the one that arrives."""
        if shift == 0:
            return own
        count, distance = len(self._peers), shift * self._stride
        target, source = (self._peers[(self._position + by) % count] for by in (distance, -distance))
        received = []
        for tensor in own.tensors():
            sent = tensor.detach().to(self._device).contiguous()
            arriving = torch.empty_like(sent)
            requests = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, target, self._group),
                                               dist.P2POp(dist.irecv, arriving, source, self._group)])
            for request in requests:
                request.wait()
            received.append(arriving)
        return own.from_tensors(received)


def _hardware() -> tuple[Any, ...]:
    """Return what the last bits of results may depend on."""
    if get_accelerator().device_name() == "cuda":
        return torch.cuda.get_device_name(), torch.__version__, torch.version.cuda, torch.backends.cudnn.version()
    return cpu_name(), torch.__version__, torch.get_num_threads(), os.environ.get("ONEDNN_MAX_CPU_ISA")
