"""Predicted step times and cost of layouts, and engines that check the estimate of the memory."""

from pretrain.extension import Command, Extension

EXTENSION = Extension(
    "planner", "Predicts step time and cost of layouts, and measures or simulates their memory.",
    commands={"compare": Command("before a run", "compare layouts: memory, step time, cost", ".main", replaces=True)},
    estimates="estimates:step_estimates")
