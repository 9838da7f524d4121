"""The control plane of 64 and 1,024 pretended ranks: counts of operations, and how they grow. No times.

The functions are the real ones, on a temporary folder (tools/benchmarks/counting.py).
"""

from dataclasses import replace
from pathlib import Path

import pytest

from pretrain.analysis.model_source import evaluation_source
from pretrain.checkpoint.format.shard_index import index_name
from pretrain.checkpoint.load.agree_on_checkpoint import agree_on_checkpoint, verify_weights
from pretrain.checkpoint.load.load_checkpoint import open_checkpoint
from pretrain.checkpoint.load.start import check_start
from pretrain.distributed.device import cpu_device
from pretrain.resilience import hang_report
from tools.benchmarks.control import PhaseCounts, count_phase
from tools.benchmarks.control_phases import PHASES, hang_record
from tools.benchmarks.counting import Counts, count_files, quick_clock
from tools.benchmarks.pretended_run import RANKS_PER_HOST, STEP, Ranks, pretend

FEW, MANY = 64, 1024
INDEX_BYTES = "index bytes"


def start_elsewhere(ranks: Ranks, **flags: str) -> None:
    """Start another run with weights or with the state of the pretended one."""
    args = replace(ranks.plan.args, save=str(ranks.folder / "other"), **flags)
    for rank in ranks.each():
        start = check_start(args, world_size=ranks.size, device=cpu_device(), complete=rank == 0,
                            first_of_host=rank % RANKS_PER_HOST == 0)
        resume = agree_on_checkpoint(start.plan, lambda _: None)
        assert (resume is None) == ("init_from" in flags)
        if start.weights is not None:
            verify_weights(start.weights)


def initial_weights(ranks: Ranks) -> None:
    start_elsewhere(ranks, init_from=str(ranks.folder / "run"))


def branch(ranks: Ranks) -> None:
    start_elsewhere(ranks, resume_from=str(ranks.folder / "run"))


def evaluate(ranks: Ranks) -> None:
    """Find, verify and open the model of `ds-pretrain evaluate`."""
    for rank in ranks.each():
        source = evaluation_source(ranks.folder / "run", None, complete=rank == 0).of_rank_0()
        source.verify(ranks=ranks.size)
        open_checkpoint(source.folder)


STARTS = {"--init_from": initial_weights, "--resume_from": branch, "evaluate": evaluate}


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, PhaseCounts]]:
    """Count all phases for both numbers of ranks."""
    found = {}
    for size in (FEW, MANY):
        ranks = pretend(tmp_path_factory.mktemp(str(size)), size)
        found[size] = {name: count_phase(ranks, phase) for name, phase in {**STARTS, **PHASES}.items()}
        texts = [ranks.checkpoints / f"global_step{STEP}" / index_name(rank) for rank in range(size)]
        found[size][INDEX_BYTES] = PhaseCounts(size, {0: Counts(read_bytes=sum(path.stat().st_size for path in texts))})
    return found


@pytest.mark.parametrize("phase", [*PHASES, *STARTS])
def test_nothing_grows_faster_than_the_number_of_ranks(counted: dict[int, dict[str, PhaseCounts]], phase: str) -> None:
    few, many = counted[FEW][phase], counted[MANY][phase]
    for key in ("operations", "opens", "stats", "changes", "entries", "read_bytes", "written_bytes"):
        assert many.total(key) <= 1.1 * MANY / FEW * few.total(key) + MANY, key  # one more of each rank
    for rank, counts in many.by_rank.items():
        assert counts.received_bytes <= 1.2 * MANY / FEW * few.first.received_bytes, rank  # O(N) small
        assert counts.lists <= 3 * max(each.lists for each in few.by_rank.values()) + 3, rank
        if rank != 0:
            assert counts.operations < 300, rank  # a constant number


def test_a_reshard_reads_each_byte_of_the_index_once(counted: dict[int, dict[str, PhaseCounts]]) -> None:
    for size in (FEW, MANY):
        found, index = counted[size]["load, other"], counted[size][INDEX_BYTES].first.read_bytes
        assert found.total("read_bytes") == index
        assert found.first.opens == size
        assert [counts.operations for rank, counts in found.by_rank.items() if rank != 0] == [0] * 3
        assert all(index <= counts.received_bytes < 1.1 * index + 1000 for counts in found.by_rank.values())


@pytest.mark.parametrize("phase", STARTS)
def test_rank_0_alone_reads_what_grows_with_the_ranks(counted: dict[int, dict[str, PhaseCounts]], phase: str) -> None:
    few, many = counted[FEW][phase], counted[MANY][phase]
    assert many.first.read_bytes > 2 * few.first.read_bytes
    for rank in (rank for rank in many.by_rank if rank != 0):
        assert many.by_rank[rank].read_bytes < 80_000, "the start of the manifest, and this rank's files"
        assert many.by_rank[rank].operations < 80


def test_rank_0_opens_each_part_once_while_it_waits(counted: dict[int, dict[str, PhaseCounts]]) -> None:
    """The ranks write for a minute. Looks every 50 ms that open each missing part would be 600,000 opens for 1,024."""
    for size in (FEW, MANY):
        saved = counted[size]["save"].first
        assert saved.opens <= size + 30  # the parts, some manifests, folders to sync
        assert saved.lists < 150


def test_rank_0_alone_asks_for_the_sizes_of_a_checkpoint(counted: dict[int, dict[str, PhaseCounts]]) -> None:
    validated = counted[MANY]["start: validate"]
    assert validated.first.stats > 3 * MANY
    assert max(counts.stats for rank, counts in validated.by_rank.items() if rank != 0) < 40
    assert counted[MANY]["preflight"].first.messages == MANY // 8


def test_of_many_ranks_a_few_look_for_the_records_of_a_hang(counted: dict[int, dict[str, PhaseCounts]],
                                                            tmp_path: Path) -> None:
    found = counted[MANY]["hang report"]
    assert [counts.lists for rank, counts in found.by_rank.items() if rank != 0] == [0] * 3
    for rank in (5, 7, 9):  # all ranks that look are lost
        hang_report.write_record(tmp_path, hang_record(rank), "")
    with quick_clock():
        assert hang_report.arrived_ranks(tmp_path, 7, MANY) == {5, 7, 9}
        (tmp_path / "report.txt").touch()
        assert hang_report.arrived_ranks(tmp_path, 9, MANY) is None


def test_what_the_counting_file_system_counts(tmp_path: Path) -> None:
    outside, counts = tmp_path / "outside", Counts()
    shared = tmp_path / "shared"
    shared.mkdir()
    with count_files(shared, counts):
        (shared / "a").write_text("12345")
        assert (shared / "a").read_text() == "12345"
        outside.write_text("not counted")
        (shared / "a").rename(shared / "b")
        assert [path.name for path in shared.glob("*")] == ["b"]
        assert (shared / "b").stat().st_size == 5
        with open(shared / "b", "rb") as file:
            file.seek(3)
            assert file.read() == b"45"
        (shared / "b").unlink()
    assert (counts.opens, counts.changes, counts.written_bytes) == (3, 2, 5)
    assert (counts.read_bytes, counts.lists, counts.entries) == (7, 1, 1)
    assert counts.stats >= 1
