"""Messages about a run for people, and its metrics for Prometheus: the flags."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pretrain.cli import LONGEST_SECONDS
from pretrain.config.flags.flag import Group
from pretrain.extension import Extension

if TYPE_CHECKING:
    from pretrain.config.flags.arguments import RunArguments

KINDS = ("start", "restart", "end", "crash", "hang", "no_progress", "spike", "rollback", "off_curve", "slow_rank",
         "corruption", "save_failed")
GROUP = Group("messages and metrics for others", not_recorded="it reports to others")


@dataclass(frozen=True)
class Notify:
    """Who hears of a run. URLs of receivers hold secrets: they are read from environment variables."""

    notify: list[str] | None = GROUP.flag(  # noqa: RUF009
        None, "send messages about the run: names of environment variables that hold URLs of apprise, such as slack:// "
        "or mailto://, several in one separated by spaces; needs the package apprise", metavar="VARIABLE")
    notify_command: str | None = GROUP.flag(
        None, "shell command that gets each message on stdin, and DS_PRETRAIN_EVENT, DS_PRETRAIN_RUN and "
        "DS_PRETRAIN_STEP in its environment", metavar="COMMAND", is_secret=True)
    notify_on: list[str] | None = GROUP.flag(  # noqa: RUF009
        None, f"kinds of messages: {', '.join(KINDS)}; several are separated by commas", metavar="KIND,...",
        unset="all")
    notify_silence: float | None = GROUP.flag(
        None, "minutes without a new row of metrics.jsonl or events.jsonl until no_progress is sent", above=0,
        high=LONGEST_SECONDS / 60, unset="30")
    metrics_port: int | None = GROUP.flag(
        None, "serve the metrics of the run for Prometheus at http://127.0.0.1:PORT/metrics; needs the package "
        "prometheus-client", low=1, high=2**16 - 1, metavar="PORT")
    metrics_address: str | None = GROUP.flag(
        None, "address of this host at which other hosts reach --metrics_port, such as 0.0.0.0 or ::, for all "
        "addresses; there is no password", metavar="ADDRESS", unset="127.0.0.1")

    @property
    def has_receivers(self) -> bool:
        """True if somebody gets messages about the run."""
        return bool(self.notify or self.notify_command)

    @property
    def variables(self) -> list[str]:
        """The names of the variables in the value of --notify: NAME or $NAME."""
        return [word.removeprefix("$") for word in self.notify or ()]


def _variables(args: "RunArguments") -> list[str]:
    return args.of(Notify).variables


EXTENSION = Extension("notify", "Sends messages about a run, and serves its metrics for Prometheus.", settings=Notify,
                      check="receivers:check_receivers", around="receivers:followed", secrets=_variables)
