"""The kinds of a verdict: what each one means, and what to do about it. Imports no torch."""

from dataclasses import dataclass

from pretrain.active_extensions import advice_on


@dataclass(frozen=True)
class Cause:
    """A kind of verdict."""

    text: str  # begins the first line of the verdict
    remedy: str




def _remedy(text: str, situation: str) -> str:
    """Return a remedy, with what extensions advise."""
    return ". ".join([text, *advice_on(situation)]) + "."


_HARDWARE = _remedy("Exclude the host until its memory and its device are tested, and resume from a checkpoint of "
                    "before this step", "device")
CAUSES = {
    "reproducible": Cause(
        "the step is reproducible: it is the data or the recipe, not the hardware",
        "Look at the samples of the step, skip them in a branch (--skip_samples), or change the recipe (learning rate, "
        "clipping) in a branch."),
    "data_changed": Cause(
        "the training data is no longer what the run read",
        "Restore the data from a copy with the hashes in the checkpoint's manifest, or find out who changed it."),
    "settings_changed": Cause(
        "the learning rate or the loss scale was not that of the recorded flags",
        "Find out what set it: code of your own, another program, or a file that was edited while the run trained."),
    "random_state": Cause(
        "the random numbers were not those of the recorded seed",
        "Find out what draws random numbers: code of your own, or another version of a package."),
    "memory_weights": Cause(
        "parameters changed in memory between two steps", _HARDWARE),
    "memory_states": Cause(
        "optimizer states or master weights changed in memory between two steps", _HARDWARE),
    "forward": Cause("the forward pass was computed wrong", _HARDWARE),
    "backward": Cause("the backward pass was computed wrong", _HARDWARE),
    "reduction": Cause(
        "gradients were right before the reduction, and wrong after it",
        _remedy("Test the network and the memory of the hosts, and resume from a checkpoint of before this step",
                "network")),
    "update": Cause("the update was computed wrong", _HARDWARE),
    "nondeterministic": Cause(
        "the replays differ from each other on all ranks: kernels are not deterministic",
        "Use deterministic kernels, or accept the difference: then only large deviations can be questioned."),
    "wrong_rank": Cause(
        "a rank computes wrong in the same way each time",
        "Exclude the host: its device is defective. Resume from a checkpoint of before the first such step."),
}
# stage of the first difference -> kind
KIND_OF_STAGE = {"data": "data_changed", "settings": "settings_changed", "random": "random_state",
                 "forward": "forward", "backward": "backward", "reduction": "reduction", "update": "update"}
