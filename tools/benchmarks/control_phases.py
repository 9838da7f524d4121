"""The phases of a run whose operations `--what control` counts: their functions run as rank 0 and as three others.

They work on small files under the names that a checkpoint of GPT-3 175B has.
"""

import json
import os
import subprocess
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import asdict, replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from pretrain.active_extensions import request_files
from pretrain.checkpoint.format.hashed_files import FileGroup, FileRecord
from pretrain.checkpoint.format.run_checkpoints import has_ended, parse_manifest
from pretrain.checkpoint.format.shard_index import index_name
from pretrain.checkpoint.load import load_checkpoint
from pretrain.checkpoint.load.agree_on_checkpoint import agree_on_checkpoint, agree_on_data
from pretrain.checkpoint.load.start import check_start
from pretrain.checkpoint.save import writer
from pretrain.checkpoint.save.commit import commit, temporary_folder, write_part
from pretrain.checkpoint.save.retention import prune
from pretrain.checkpoint.save.save_checkpoint import begin_save
from pretrain.cluster.hosts import preflight, probe, remote
from pretrain.config.flags.arguments import RunArguments
from pretrain.distributed.collectives import gather
from pretrain.distributed.device import cpu_device
from pretrain.monitor.environment import host_record
from pretrain.monitor.training_row import gather_ranks
from pretrain.monitor.write_run_folder import RunFolder
from pretrain.resilience import hang_report, replicas
from pretrain.resilience.requests import ControlFiles
from pretrain.resilience.run_lock import RunLock
from tools.benchmarks.counting import count_files, quick_clock
from tools.benchmarks.pretended_run import RANKS_PER_HOST, STEP, Ranks, files_of, pretended_manifest

SAVE_S = 60.0  # time in which the ranks write their files, one after another
_open, _write = os.open, os.write  # of ranks that are not counted
Phase = Callable[[Ranks], None]


def validate(ranks: Ranks) -> None:
    """Validate the flags and the newest checkpoint, and take the run's lock, before the ranks connect."""
    for rank in ranks.each():
        check_start(ranks.plan.args, world_size=ranks.size, device=cpu_device(), complete=rank == 0,
                    first_of_host=rank % RANKS_PER_HOST == 0)
        hang_report.hang_folder(ranks.folder / "run")
        if rank == 0:
            with RunLock(ranks.folder / "run"):
                pass


def agree(ranks: Ranks) -> None:
    """Agree on the data and on the checkpoint, whose files the ranks verify."""
    for _ in ranks.each():
        gather((host_record(), os.getpid()))
        agree_on_data(ranks.plan)
        assert agree_on_checkpoint(ranks.plan, lambda _: None) is not None


def load_same(ranks: Ranks) -> None:
    """Compare this rank's shard index with the engine. DeepSpeed then reads its own files."""
    folder = ranks.checkpoints / f"global_step{STEP}"
    with mock.patch.object(load_checkpoint, "index_json", return_value=(folder / index_name(0)).read_text()):
        for _ in ranks.each():
            load_checkpoint.same_shards(mock.Mock(), folder)


def load_other(ranks: Ranks) -> None:
    """Read the shard indexes in another layout."""
    for _ in ranks.each():
        load_checkpoint.open_checkpoint(ranks.checkpoints / f"global_step{STEP}")


def save(ranks: Ranks) -> None:
    """Save in the background: each rank records its files, rank 0 commits. Then rank 0 looks for old checkpoints."""
    step, record = STEP + 10, FileRecord(1, "0" * 64)
    temporary = temporary_folder(ranks.checkpoints, step)
    save_id, recorded = "", 0

    def parts_until(seconds: float) -> None:
        """Record the files of the ranks that have written them by now."""
        nonlocal recorded
        while recorded < min(ranks.size, ranks.size * seconds / SAVE_S):
            if recorded not in ranks.sampled:
                files = dict.fromkeys(files_of(recorded), record)
                for name in files:
                    _write_uncounted(temporary / name, "x")
                part = {"save_id": save_id, "rank": recorded, "files": {name: asdict(record) for name in files},
                        "finite": True, "error": None}
                _write_uncounted(temporary / f".part-{recorded:05d}.json", json.dumps(part))
            recorded += 1

    for rank in ranks.each():
        temporary, save_id = begin_save(ranks.plan, ranks.checkpoints, step)
        with FileGroup() as group:
            for name in files_of(rank):
                with group.open_file(temporary / name) as file:
                    file.write(b"x")
            write_part(temporary, rank=rank, save_id=save_id, files=group.finish(), finite=True)
    for rank in ranks.each():
        if rank == 0:
            with quick_clock(parts_until):
                commit(temporary, pretended_manifest(ranks.plan, step, save_id), timeout_s=600,
                       has_ended=partial(has_ended, ranks.checkpoints))
            prune(ranks.checkpoints, keep_checkpoints=2, keep_every=0, keep_best=0, verified=set())


def wait_to_mirror(ranks: Ranks) -> None:
    """Wait until rank 0 has committed the save, before this rank copies its files to the mirror."""
    final = ranks.checkpoints / f"global_step{STEP}"
    temporary, hidden = temporary_folder(ranks.checkpoints, STEP), final.with_name("hidden")
    job = writer.SaveJob(step=STEP, final=str(final), rank=0, world_size=ranks.size, timeout_s=600, mirror="mirror",
                         save_id=parse_manifest(final).save_id, locks_are_shared=True, names=[], keep={},
                         snapshot=writer.SnapshotFiles(str(temporary), [], None, True, None))

    def commit_after(seconds: float) -> None:
        if seconds >= SAVE_S and hidden.exists():
            hidden.rename(final)

    temporary.mkdir()
    for rank in ranks.sampled:
        final.rename(hidden)
        with quick_clock(commit_after), count_files(ranks.folder, ranks.counts[rank]):
            assert writer._wait_for_commit(replace(job, rank=rank)) is not None
    temporary.rmdir()


def _write_uncounted(path: Path, text: str) -> None:
    descriptor = _open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    _write(descriptor, text.encode())
    os.close(descriptor)


def logged_step(ranks: Ranks) -> None:
    """Log a step: gather the times of all ranks, write rows, look for files that request something."""
    run = ranks.folder / "run"
    for rank in ranks.each():
        phases = dict.fromkeys(("forward", "backward", "wait", "reduce", "optimizer", "other"), 1.0)
        gather_ranks(torch.zeros(()), data_seconds=0.1, phase_ms=_PhaseTimes(phases), power_watts=None,
                     squares=torch.zeros(3))
        if rank != 0:
            continue
        folder = RunFolder(run, active=True)
        folder.event("save", step=1)
        folder.metrics({"step": 1})
        files = ControlFiles(run, lambda: 0, request_files(RunArguments()))
        for look in (files.stop_requested, files.save_requested, files.take_asked):
            look()


class _PhaseTimes(dict[str, float]):
    """1 ms of each phase."""

    def __missing__(self, key: str) -> float:
        return 1.0


def replica_check(ranks: Ranks) -> None:
    """Compare the checksums of the copies of 100 tensors."""
    copies = replicas.Copies(mock.Mock(), {str(number): torch.zeros(4) for number in range(100)})
    engine = mock.Mock(device=torch.device("cpu"))
    for _ in ranks.each():
        with mock.patch.object(replicas, "replicated_tensors", return_value=[copies]):
            replicas.compare_copies(engine)


def hang(ranks: Ranks) -> None:
    """Each rank writes its record, and some wait for all records and report the hang."""
    folder = ranks.folder / "run" / "hangs" / "1"
    folder.mkdir(parents=True)
    for rank in set(range(ranks.size)) - {*ranks.sampled}:
        hang_report.write_record(folder, hang_record(rank), "")
    for rank in ranks.each():
        hang_report.write_record(folder, hang_record(rank), "stacks")
    for rank in ranks.each():
        with quick_clock():
            arrived = hang_report.arrived_ranks(folder, rank, ranks.size)
        if arrived is not None:
            records = hang_report.read_records(folder, arrived)
            with redirect_stderr(StringIO()):
                hang_report.report_hang(ranks.folder / "run", folder, records, ranks.size, [])


def hang_record(rank: int) -> hang_report.RankRecord:
    return hang_report.RankRecord.of_process(os.getpid(), rank=rank, phase="step", step=1, entered=1, seconds=9.0,
                                             limit_s=8.0, flag="--step_timeout")


def preflight_check(ranks: Ranks) -> None:
    """Collect the facts of all hosts by ssh and compare them, on the host that launches the run."""
    hosts = {f"host-{number:05d}": RANKS_PER_HOST for number in range(max(ranks.size // RANKS_PER_HOST, 1))}
    facts = json.dumps({"python": "3.11", "packages": {}, "has_folder": True, "code_version": "1", "code_digest": "1",
                        "commit": None, "files": {}, "run_problem": "", "interface": ["eth0", "10.0.0.1"],
                        "cores": 1, "gpus": 0})
    counts = ranks.counts[0]

    def answer(*_: Any, stdin: str = "", **__: Any) -> "subprocess.CompletedProcess[str]":
        counts.messages += 1
        return subprocess.CompletedProcess([], 0, facts, "")

    request = preflight.PreflightRequest(run=ranks.folder / "run", files=(), folder=ranks.folder)
    with mock.patch.object(remote, "run_on_host", answer), count_files(ranks.folder, counts), \
            mock.patch.object(probe, "host_facts", return_value=json.loads(facts)):
        preflight.check_hosts(remote.local_transport, hosts, request)


PHASES: dict[str, Phase] = {
    "preflight": preflight_check, "start: validate": validate, "start: agree": agree, "load, same": load_same,
    "load, other": load_other, "logged step": logged_step, "replica check": replica_check, "hang report": hang,
    "save": save, "mirror: wait": wait_to_mirror}
