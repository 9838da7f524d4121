"""Profiler: traces and tables of operators for single steps, and the output of DeepSpeed's communication logger.

The steps are given by --profile_steps, or requested by a user while the run trains.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.comm import comms_logger

from pretrain.callback import Callback, Run
from pretrain.extensions.profile.extension import REQUEST, Profile, parse_ranks, parse_steps
from pretrain.paths import PROFILES_FOLDER

if TYPE_CHECKING:
    from pretrain.resilience.requests import Request

_TABLE_ROWS = 40
_SNAPSHOT_ENTRIES = 1_000_000  # allocations that torch remembers; older ones are dropped


class Profiler(Callback):
    """Profiles steps with torch.profiler. Each rank of --profile_ranks writes files of its own.

    RUN/profiles/stepFIRST-LAST/ gets rankN.trace.json.gz (for https://ui.perfetto.dev or chrome://tracing), rankN.txt
    (the operators with the most time of their own) and, with --memory_snapshot, rankN.memory.pickle (for
    https://docs.pytorch.org/memory_viz). A profile that cannot be written causes a warning; the run continues.
    """

    order = 10  # a profile begins before anything else of its first step

    def __init__(self, flags: Profile) -> None:
        self._flags = flags
        self._requested = 0  # steps to profile from the next one on
        self._profile: torch.profiler.profile | None = None  # None on the ranks that write none
        self._range: torch.profiler.record_function | None = None  # range of the current step
        self._first, self._last, self._steps_left = 0, 0, 0  # the profile that is being recorded

    def start(self, run: Run) -> None:
        flags, self._run = self._flags, run
        self._planned = parse_steps(flags.profile_steps) if flags.profile_steps else None
        self._is_active = run.world.rank in parse_ranks(flags.profile_ranks, run.plan.layout.world_size)

    def requested(self, run: Run, request: "Request") -> None:
        """Profile the next steps; ignored while a profile is being recorded."""
        self._requested = request.asked.get(REQUEST, 0)

    def begin_step(self, run: Run) -> None:
        """Begin a profile if this step is the first one of it. Finish the profile that ended with the step before."""
        step = run.step
        if self._steps_left == 0:
            self._finish()
            if self._planned is not None and step == self._planned.first:
                self._begin(step, self._planned.last - step + 1)
            elif self._requested:
                self._begin(step, self._requested)
        self._requested = 0
        if self._steps_left:
            self._last, self._steps_left = step, self._steps_left - 1
            self._mark(step)

    def close(self, run: Run) -> None:
        """Finish the profile that is being recorded, and write the summary of DeepSpeed's communication logger."""
        self._finish()
        if run.world.rank == 0 and run.plan.ds_config.get("comms_logger", {}).get("enabled"):
            self._write(run.folder.path / PROFILES_FOLDER, _write_communication)

    def _begin(self, step: int, num_steps: int) -> None:
        self._first, self._steps_left = step, num_steps
        if not self._is_active:
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if get_accelerator().device_name() == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        if self._flags.memory_snapshot:
            torch.cuda.memory._record_memory_history(max_entries=_SNAPSHOT_ENTRIES)
        self._profile = torch.profiler.profile(activities=activities, record_shapes=True)
        self._profile.start()

    def _mark(self, step: int | None) -> None:
        """End the range of the previous step in the trace, and begin the range of `step`."""
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        if self._profile is not None and step is not None:
            self._range = torch.profiler.record_function(f"step {step}")
            self._range.__enter__()

    def _finish(self) -> None:
        """Stop the profile that is being recorded, if there is one, and write its files."""
        if self._profile is None:
            return
        self._mark(None)
        run, profile, self._profile = self._run, self._profile, None
        get_accelerator().synchronize()  # the kernels of the last step belong to the trace
        profile.stop()
        run.watchdog.enter("save", self._last)  # writing may take longer than a step
        name = f"{PROFILES_FOLDER}/step{self._first}-{self._last}"
        is_written = self._write(run.folder.path / name, lambda folder: self._write_profile(profile, folder))
        if self._flags.memory_snapshot:
            torch.cuda.memory._record_memory_history(enabled=None)
        if run.world.rank == 0 and is_written:
            run.screen.line(f"profile of the steps {self._first} to {self._last}: {run.folder.path / name}")
            run.folder.event("profile", step=self._last, first_step=self._first, path=name)
        run.meter.restart_timing(self._last)

    def _write_profile(self, profile: torch.profiler.profile, folder: Path) -> None:
        rank = self._run.world.rank
        profile.export_chrome_trace(str(folder / f"rank{rank}.trace.json.gz"))
        sort_by = "self_cpu_time_total" if get_accelerator().device_name() == "cpu" else "self_device_time_total"
        table = profile.key_averages().table(sort_by=sort_by, row_limit=_TABLE_ROWS)
        (folder / f"rank{rank}.txt").write_text(table, encoding="utf-8")
        if self._flags.memory_snapshot:
            torch.cuda.memory._dump_snapshot(str(folder / f"rank{rank}.memory.pickle"))

    def _write(self, folder: Path, write: Callable[[Path], None]) -> bool:
        """Call `write` with the folder. An error becomes a warning. Return whether there was none."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write(folder)
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError for a file that it cannot write
            reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
            print(f"warning: {folder}: the profile of rank {self._run.world.rank} is not written ({reason})")
            return False
        return True


def _write_communication(folder: Path) -> None:
    """Write comms.json and comms.txt: number, size and time of each collective of DeepSpeed on this rank."""
    summary: dict[str, dict[int, dict[str, Any]]] = comms_logger.log_all(print_log=False, return_dict=True)["summary"]
    (folder / "comms.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
    lines = [f"{'operation':<30}{'size':>12}{'count':>9}{'total ms':>12}{'mean ms':>11}"]
    lines += [f"{name:<30}{row['msg_size_str']:>12}{row['count']:>9}{row['total_latency_ms']:>12.2f}"
              f"{row['avg_latency_ms']:>11.3f}" for name, sizes in summary.items() for row in sizes.values()]
    (folder / "comms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
