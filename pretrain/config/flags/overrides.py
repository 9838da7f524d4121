"""Names of --override: the settings of a checkpoint that a resume or a branch may change when they are named."""

from dataclasses import dataclass
from typing import Any, TypedDict

from pretrain.cli import chosen
from pretrain.config.flags.arguments import FLAGS, OVERRIDES, RunArguments

# flags whose values a checkpoint records -> the name that allows another value
RECIPE_FLAGS = {name: flag.override for name, flag in FLAGS.items() if flag.override}

# entry of run.json, of the manifest and of the event "override"
OverrideRecord = TypedDict("OverrideRecord", {"step": int, "name": str, "setting": str, "from": Any, "to": Any})


@dataclass(frozen=True)
class Change:
    """A setting that differs between a checkpoint and the run that continues from it."""

    name: str  # of --override; "": no name allows it
    setting: str
    before: Any  # in the checkpoint
    now: Any

    def record(self, step: int) -> OverrideRecord:
        """Return the entry about a change after `step`."""
        return {"step": step, "name": self.name, "setting": self.setting, "from": self.before, "to": self.now}


def named_overrides(args: RunArguments) -> frozenset[str]:
    """Return the names that --override and --allow_other_data give. Raises ConfigError for an unknown name."""
    words = chosen("--override", args.override or [], list(OVERRIDES))
    return frozenset(words) | ({"data"} if args.allow_other_data else frozenset())


def allows_other_data(args: RunArguments) -> bool:
    """Return whether the run may train on other data than its checkpoint."""
    return "data" in named_overrides(args)
