"""Get and set the state of one rank's random number generators; name the checkpoint file that holds this state."""

from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator


def rng_file(folder: Path, rank: int) -> Path:
    """Return the path of a rank's file in a checkpoint folder."""
    return folder / f"rng_state_rank_{rank:05d}.pt"


def rng_state() -> dict[str, torch.Tensor]:
    """Return the current states of torch's generators: "cpu" and, with an accelerator, "device"."""
    device = get_accelerator()
    states = {"cpu": torch.get_rng_state()}
    if device.device_name() != "cpu":
        states["device"] = device.get_rng_state()
    return states


def set_rng_state(states: dict[str, torch.Tensor]) -> None:
    """Restore what `rng_state` returned; the device's state is ignored on a machine without an accelerator."""
    torch.set_rng_state(states["cpu"])
    if "device" in states and get_accelerator().device_name() != "cpu":
        get_accelerator().set_rng_state(states["device"])
