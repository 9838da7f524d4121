"""Validate the flags of the learning-rate schedule: ranges, and flags without an effect on the chosen schedule."""

from pretrain.config.flags.training_flags import ScheduleArguments
from pretrain.errors import ConfigError

_DECAYING = ("cosine", "linear", "wsd", "one_cycle")
_SCHEDULES_OF = {
    **dict.fromkeys(("lr_decay_steps", "lr_decay_tokens"), _DECAYING),
    **dict.fromkeys(("lr_wsd_steps", "lr_wsd_tokens", "lr_decay_shape"), ("wsd",)),
    **dict.fromkeys(("lr_milestones", "lr_milestone_tokens", "lr_milestone_factor"), ("step",)),
    **dict.fromkeys(("min_lr", "min_lr_ratio"), (*_DECAYING, "inverse_sqrt", "step")),
}
_ALTERNATIVES = (("lr_warmup_steps", "lr_warmup_tokens"), ("lr_decay_steps", "lr_decay_tokens"),
                 ("lr_wsd_steps", "lr_wsd_tokens"), ("lr_milestones", "lr_milestone_tokens"),
                 ("min_lr_ratio", "min_lr"))


def check_schedule_flags(flags: ScheduleArguments) -> None:
    """Reject --lr_* flags out of range, twice the same setting, and flags without an effect."""
    if flags.min_lr_ratio is not None and not 0 <= flags.min_lr_ratio <= 1:
        raise ConfigError("--min_lr_ratio", found=flags.min_lr_ratio, expected="a fraction from 0 to 1")
    if flags.lr_milestone_factor is not None and not 0 < flags.lr_milestone_factor <= 1:
        raise ConfigError("--lr_milestone_factor", found=flags.lr_milestone_factor, expected="above 0 and at most 1")
    for first, second in _ALTERNATIVES:
        if getattr(flags, first) is not None and getattr(flags, second) is not None:
            raise ConfigError(f"--{first} / --{second}", found="both", expected="one of the two")
    for name, schedules in _SCHEDULES_OF.items():
        if getattr(flags, name) is not None and flags.lr_schedule not in schedules:
            raise ConfigError(f"--{name}", found=f"{getattr(flags, name)} with --lr_schedule {flags.lr_schedule}",
                              expected="no value", remedy=f"it has an effect on {', '.join(schedules)} only")
    if flags.lr_schedule == "step" and flags.lr_milestones is None and flags.lr_milestone_tokens is None:
        raise ConfigError("--lr_milestones", problem="the flag is missing, and --lr_schedule step needs it",
                          remedy="give the numbers of steps after which the rate falls, such as 8000,9000")
    if (flags.lr_reference_batch is None) != (flags.lr_scaling is None):
        given, missing = "lr_reference_batch", "lr_scaling"
        if flags.lr_reference_batch is None:
            given, missing = missing, given
        raise ConfigError(f"--{given}", problem=f"it has no effect without --{missing}", remedy=f"give --{missing}, "
                          "or leave both out")
