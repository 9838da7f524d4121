"""Remarks about a run before its start: its predicted memory, warnings and notes."""

from collections.abc import Sequence

from pretrain.config.plan import Plan
from pretrain.distributed.device import Device
from pretrain.errors import ConfigError
from pretrain.memory.estimate.estimate_memory import MemoryEstimate, estimate_memory
from pretrain.memory.footprint import DEFAULT_MARGIN, with_unit

COMPARE = "`ds-pretrain compare` compares layouts that fit"


def plan_remarks(plan: Plan, device: Device, *, warnings: Sequence[str] = (),
                 ranks_per_host: int | None = None) -> list[tuple[str, str]]:
    """Return (kind, text) of what a user should know about a valid run before its start.

    "memory": the prediction; "warning": it does not fit the device; "note": the notes of the plan.

    Args:
        warnings: other warnings, as of a resume.
        ranks_per_host: default: all ranks of the run.
    """
    notes = [*(("note", note) for note in plan.notes), *(("warning", warning) for warning in warnings)]
    try:
        estimate = estimate_memory(plan.model, plan.layout)
    except ConfigError as error:
        return [("memory", f"no prediction: {error}"), *notes]
    needed, ranks = estimate.needed_bytes, ranks_per_host or plan.layout.world_size
    remarks = [("memory", f"{prediction_text(estimate)}, on the rank with the most memory")]
    if not device.memory_bytes:
        remarks = [("memory", f"{remarks[0][1]}; the memory of the device is not known on this machine")]
    elif needed > device.memory_bytes * (1 - DEFAULT_MARGIN):
        where = "of this host" if device.kind == "cpu" else "of the device"
        remarks.append(("warning", f"THE RUN DOES NOT FIT: a rank needs {with_unit(needed)}, and the memory {where} is "
                                   f"{with_unit(device.memory_bytes)}. {COMPARE}"))
    elif device.kind == "cpu" and ranks * needed > device.memory_bytes * (1 - DEFAULT_MARGIN):
        remarks.append(("warning", f"{ranks} ranks do not fit this host: each needs {with_unit(needed)}, and the host "
                                   f"has {with_unit(device.memory_bytes)}. Use more hosts. {COMPARE}"))
    return [*remarks, *notes]


def prediction_text(estimate: MemoryEstimate) -> str:
    return f"predicted {with_unit(estimate.needed_bytes)} at the peak ({sizes_by_role(estimate)})"


def sizes_by_role(estimate: MemoryEstimate) -> str:
    """List the peak of each role: "parameters 1.2 GiB, gradients ..."."""
    roles = dict.fromkeys(role for role, _, _ in estimate.peak.rows())
    return ", ".join(f"{role.replace('_', ' ')} {with_unit(estimate.peak.total(role))}" for role in roles)
