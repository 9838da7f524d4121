"""The kinds of faults that tools/chaos.py can apply."""

from dataclasses import dataclass
from typing import Literal

Effect = Literal["ends", "damages", "continues"]


@dataclass(frozen=True)
class Kind:
    """A kind of fault."""

    name: str
    effect: Effect  # "ends": the start ends; "damages": files that the next start reads; "continues": no restart needed
    about: str


KINDS = {kind.name: kind for kind in (
    Kind("kill_rank", "ends", "SIGKILL to one rank"),
    Kind("kill_launcher", "ends", "SIGKILL to a launcher"),
    Kind("signal", "ends", "SIGTERM, SIGINT or SIGUSR1 to one rank, to all ranks or to the launcher"),
    Kind("hang", "ends", "SIGSTOP to one rank, until the watchdog ends the run"),
    Kind("cut_link", "ends", "shut down the TCP connections of one rank"),
    Kind("pause", "continues", "SIGSTOP to one rank, and SIGCONT up to 2 seconds later"),
    Kind("nan", "continues", "a batch with a loss of NaN on one data-parallel rank"),
    Kind("disk_full", "continues", "checkpoint writes fail with ENOSPC until a save has failed"),
    Kind("bit_flip", "damages", "one bit of a file of the newest checkpoint"),
    Kind("truncate", "damages", "a file of the newest checkpoint is cut off"),
    Kind("delete", "damages", "a file of the newest checkpoint is deleted"),
    Kind("latest", "damages", "the file `latest` of the checkpoints is overwritten"),
    Kind("data", "damages", "the training data is cut off during one start"),
)}
CHECKPOINT_DAMAGE = ("bit_flip", "truncate", "delete")
