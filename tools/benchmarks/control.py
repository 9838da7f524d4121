"""--what control: what each phase of a run of 64, 1,024 and 16,384 ranks costs besides DeepSpeed's steps, by count.

See control_phases.py for the phases, and counting.py for what is counted. Seconds follow from the counts, at the
latencies below.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tools.benchmarks.control_phases import PHASES, Phase
from tools.benchmarks.counting import Counts
from tools.benchmarks.pretended_run import RANKS_PER_HOST, Ranks, pretend
from tools.benchmarks.processes import BenchContext, ReportProgress
from tools.benchmarks.report import BenchSection

WORLD_SIZES = (64, 1024, 16384)
NFS_S = 1e-3  # of an operation
LUSTRE_OPERATIONS_PER_S = 5000  # of the metadata server, for all ranks together


@dataclass(frozen=True)
class PhaseCounts:
    """Counts of one phase at one number of ranks."""

    size: int
    by_rank: dict[int, Counts]  # of the sampled ranks

    @property
    def first(self) -> Counts:
        """Counts of rank 0."""
        return self.by_rank[0]

    def total(self, key: str) -> float:
        """Return the sum over all ranks of a field or property of Counts: other ranks are as the sampled ones."""
        hosts = self.size // RANKS_PER_HOST
        return float(getattr(self.first, key)) + (hosts - 1) * self._mean(key, first_of_host=True) + \
            (self.size - hosts) * self._mean(key, first_of_host=False)

    def _mean(self, key: str, *, first_of_host: bool) -> float:
        values = [float(getattr(counts, key)) for rank, counts in self.by_rank.items()
                  if rank != 0 and (rank % RANKS_PER_HOST == 0) == first_of_host]
        return sum(values) / max(len(values), 1)

    @property
    def nfs_s(self) -> float:
        """Seconds of the rank that waits longest, if an operation takes NFS_S and the server answers all at once."""
        return max(counts.waits for counts in self.by_rank.values()) * NFS_S

    @property
    def lustre_s(self) -> float:
        """Seconds of the metadata server for the operations of all ranks."""
        return self.total("operations") / LUSTRE_OPERATIONS_PER_S


def count_phase(ranks: Ranks, phase: Phase) -> PhaseCounts:
    """Run a phase as the sampled ranks, and return what they asked for."""
    ranks.counts = {rank: Counts() for rank in ranks.sampled}
    phase(ranks)
    return PhaseCounts(ranks.size, ranks.counts)


def control(context: BenchContext, report: ReportProgress) -> BenchSection:
    """Count all phases at each number of ranks."""
    found: dict[str, dict[int, PhaseCounts]] = {name: {} for name in PHASES}
    for size in WORLD_SIZES:
        report(f"{size:,} ranks")
        with TemporaryDirectory(dir=context.folder) as folder:
            ranks = pretend(Path(folder), size)
            for name, phase in PHASES.items():
                found[name][size] = count_phase(ranks, phase)
    rows = [[f"{name}", f"{size:,}", *_cells(counts)] for name, by_size in found.items()
            for size, counts in by_size.items()]
    notes = ["Operations of the shared file system (opens, listings, questions about a name, changes) by rank 0 and "
             f"by all ranks. NFS: seconds of the rank that waits longest, {NFS_S * 1e3:g} ms an operation. Lustre: "
             f"seconds of the metadata server, {LUSTRE_OPERATIONS_PER_S:,} operations/s for all ranks together.",
             "To each: bytes that a rank gets in collectives. Read: by all ranks. Shard indexes are those of GPT-3 "
             "175B; the other files of the checkpoint are small here.",
             f"A preflight also makes a connection by ssh to each host of {RANKS_PER_HOST} ranks."]
    data = {name: {str(size): {"rank_0": asdict(counts.first), "file_operations": counts.total("operations"),
                               "read_bytes": counts.total("read_bytes"), "nfs_s": counts.nfs_s,
                               "lustre_s": counts.lustre_s} for size, counts in by_size.items()}
            for name, by_size in found.items()}
    return BenchSection("control", "Control plane", ["phase", "ranks", "rank 0", "all", "read", "to each", "NFS",
                                                     "Lustre"], rows, notes, [], {"phases": data})


def _cells(counts: PhaseCounts) -> list[str]:
    return [_short(counts.first.operations), _short(counts.total("operations")),
            _short(counts.total("read_bytes"), "B"), _short(counts.first.received_bytes, "B"),
            *(f"{seconds:.0f}" if seconds >= 100 else f"{seconds:.2g}" for seconds in (counts.nfs_s, counts.lustre_s))]


def _short(number: float, unit: str = "") -> str:
    for size, name in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= size:
            return f"{number / (1e3 if name == 'k' else size):,.3g} {name}{unit}"
    return f"{number:,.0f}{f' {unit}' if unit else ''}"
