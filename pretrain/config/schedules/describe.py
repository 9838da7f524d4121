"""Describe the learning-rate schedule and the batch sizes of a run in a few words."""

from pretrain.config.schedules.length import RunLength
from pretrain.config.schedules.schedule import Schedule


def schedule_text(schedule: Schedule) -> str:
    """Describe a schedule: `wsd, peak 0.0003, 10 warm-up steps, linear decay in the last 200 steps to 3e-05`."""
    parts = [schedule.kind, f"peak {schedule.peak:g}", _count(schedule.warmup_steps, "warm-up step")]
    lowest = f"{schedule.peak * schedule.min_ratio:g}"
    if schedule.kind == "wsd":
        parts.append(f"{schedule.decay_shape} decay in {_count(schedule.wsd_steps, 'step')} until step "
                     f"{schedule.decay_steps:,}, lowest {lowest}")
    elif schedule.kind == "step":
        parts.append(f"x {schedule.milestone_factor:g} after the steps {', '.join(map(str, schedule.milestones))}")
    elif schedule.kind == "inverse_sqrt":
        parts.append(f"lowest {lowest}")
    elif schedule.kind != "constant":
        parts.append(f"lowest {lowest} from step {schedule.decay_steps:,} on")
    return ", ".join(parts)


def rates_text(schedule: Schedule, train_steps: int) -> str:
    """Return the rates of a few steps: the first, the ends of all phases, the middle and the last."""
    steps = {1, schedule.warmup_steps, train_steps // 2, train_steps, schedule.decay_steps,
             *(milestone + 1 for milestone in schedule.milestones)}
    if schedule.wsd_steps:
        steps.add(schedule.decay_steps - schedule.wsd_steps)
    return ", ".join(f"step {step:,}: {schedule(step - 1):.4g}" for step in sorted(steps) if 1 <= step <= train_steps)


def batches_text(length: RunLength) -> str:
    """Return the global batch size of each stage of --batch_schedule that the run reaches; "" without stages."""
    sizes = length.batch_sizes
    if len(sizes.stages) == 1:
        return ""
    begins = {size: sizes.steps_until(first, first_sample=length.first_sample) + 1 for first, size in sizes.stages}
    return ", ".join(f"{size} samples from step {step:,} on" for size, step in begins.items()
                     if step <= length.train_steps)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
