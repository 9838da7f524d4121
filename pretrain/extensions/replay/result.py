"""The result of a replay, from the differences between the run and its replays, and between the replays.

CAUSES has the kinds of results: what each means, and what to do about it. This module imports no torch.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pretrain.active_extensions import advice_on
from pretrain.errors import counted, named
from pretrain.extensions.replay.compare import (
    BACKWARD,
    DIGEST,
    FORWARD,
    REDUCTION,
    SETTINGS,
    STAGES,
    UPDATE,
    WEIGHTS,
    Comparison,
)

SURE, UNSURE = "sure", "unsure"


@dataclass(frozen=True)
class Cause:
    """A kind of result."""

    text: str  # begins the first line of the result
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


@dataclass(frozen=True)
class Result:
    """Why a step was as it was."""

    kind: str  # key of CAUSES
    certainty: str  # sure or unsure
    reasons: list[str] = field(default_factory=list)  # why it is unsure
    also: list[str] = field(default_factory=list)  # other kinds that the record cannot tell from this one
    step: int | None = None  # where the run and the replay part
    stage: str | None = None
    direction: str | None = None  # forward, backward, reduction or update
    ranks: list[int] = field(default_factory=list)  # where it begins: one of them
    hosts: list[str] = field(default_factory=list)
    pipeline_stage: int | None = None
    layer: str | None = None
    operator: str | None = None  # inside of the layer, such as "3.mlp.up"
    now: bool = False  # it happens again in the replays
    evidence: list[str] = field(default_factory=list)
    remedy: str = ""

    @property
    def text(self) -> str:
        return CAUSES[self.kind].text

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "text": self.text}

    def unsure(self, reason: str, *also: str) -> "Result":
        """Return the result, with a reason why it is unsure."""
        return replace(self, certainty=UNSURE, reasons=[*self.reasons, reason],
                       also=[*self.also, *(kind for kind in also if kind not in (self.kind, *self.also))])


def find_cause(run: Comparison, replays: Sequence[Comparison] = (), *, other_machine: Sequence[str] = (),
          recomputed: Sequence[dict[str, Any]] | None = None) -> Result:
    """Return the result.

    Args:
        run: the run compared with the first replay.
        replays: the first replay compared with each further one.
        other_machine: how versions or hardware differ from the recorded ones, a line each.
        recomputed: events of a replay about micro-batches that another rank computed with another result; None: no
            other rank has computed them.
    """
    if not run.compared:
        return Result("reproducible", SURE, remedy="The flight recorder writes what is compared (--flight_steps)."
                       ).unsure("no recorded step can be compared", *(set(CAUSES) - {"reproducible"}))
    differing = next((each for each in replays if each.step is not None), None)
    if differing is not None:
        return _of_replays(differing)
    if run.step is None:
        return _equal(run, recomputed)
    found = _of_difference(run)
    found = replace(found, evidence=[*found.evidence, *_of_repeats(len(replays))])
    if other_machine and found.kind not in ("data_changed", "settings_changed"):
        found = found.unsure(f"the replay is not bit-exact on other hardware or versions: {'; '.join(other_machine)}")
    elif found.direction == FORWARD and run.is_everywhere(found.ranks) and len(run.data_ranks) > 1:
        found = found.unsure("all data-parallel ranks differ, and no fault of one rank does that; another number of "
                            "threads or another choice of kernels does", "nondeterministic")
    if not replays and found.kind not in ("data_changed", "settings_changed"):
        found = found.unsure("it was replayed once: a second replay would show whether the kernels are deterministic",
                            "nondeterministic")
    return found


def _equal(run: Comparison, recomputed: Sequence[dict[str, Any]] | None) -> Result:
    """Return the result if the replay equals the run."""
    steps = f"steps {run.compared[0]} to {run.compared[-1]}" if len(run.compared) > 1 else f"step {run.compared[0]}"
    lines = [f"{steps}: all recorded values of {counted(len(run.headers), 'rank')} are equal, bit by bit",
             f"{counted(len(run.complete), 'step')} of these with checksums of weights, states and gradients"]
    if recomputed:
        return _wrong_rank(run, recomputed, lines)
    found = Result("reproducible", SURE, step=None, evidence=lines, remedy=CAUSES["reproducible"].remedy)
    if run.last not in run.compared:
        return found.unsure(f"step {run.last} itself is not recorded", *KIND_OF_STAGE.values())
    if run.missing_ranks:
        return found.unsure(f"no record of {named('rank', run.missing_ranks)}", "forward", "backward")
    if recomputed is None:
        return found.unsure("there is one data-parallel rank: a device that always computes wrong in the same way "
                            "would give the same values again", "wrong_rank")
    return replace(found, evidence=[*lines, "other data-parallel ranks computed a micro-batch of each rank with the "
                                    "same bits"])


def _wrong_rank(run: Comparison, recomputed: Sequence[dict[str, Any]], lines: list[str]) -> Result:
    """Return the result if ranks compute the same micro-batch with different results."""
    event = recomputed[0]
    suspects = [rank for rank in event.get("ranks") or [] if isinstance(rank, int)]
    layer = str(event.get("layer") or "").removeprefix("layer ").partition(" ")[0]  # without the name of its class
    found = Result("wrong_rank", SURE, step=event.get("step"), stage=event.get("direction"),
                    direction=event.get("direction"), layer=layer or None,
                    ranks=suspects, hosts=run.hosts(suspects), now=True, remedy=CAUSES["wrong_rank"].remedy,
                    evidence=[*lines, str(event.get("reason"))])
    if event.get("finding") in ("wrong", "flaky"):
        return found
    return found.unsure("two ranks disagree, and a third data-parallel rank is needed to tell which one is wrong")


def _of_replays(differing: Comparison) -> Result:
    """Return the result if two replays differ from each other."""
    found = replace(_of_difference(differing), now=True)
    lines = ["two replays differ from each other: it happens now, not only in the past", *found.evidence]
    if found.stage == WEIGHTS or not differing.is_everywhere(found.ranks) or found.stage in (REDUCTION, UPDATE):
        return replace(found, evidence=lines)
    if len(differing.data_ranks) == 1:
        return replace(found, evidence=lines).unsure(
            "there is one data-parallel rank: a flaky device and kernels that are not deterministic look the same",
            "nondeterministic")
    return replace(found, kind="nondeterministic", evidence=lines, remedy=CAUSES["nondeterministic"].remedy)


def _of_difference(found: Comparison) -> Result:
    """Return the result about the first difference alone."""
    stage = found.stage
    assert stage is not None
    rules = {WEIGHTS: _memory, FORWARD: _forward, BACKWARD: _backward, REDUCTION: _reduction, UPDATE: _update}
    if stage in rules:
        result = rules[stage](found)
    else:
        result = _start(found, KIND_OF_STAGE[stage], found.ranks_with(_keys_of(stage)))
    result = replace(result, step=found.step, stage=stage, evidence=[_where(found, stage), *result.evidence])
    if found.missing_ranks and stage not in ("data", SETTINGS):
        result = result.unsure(f"no record of {named('rank', found.missing_ranks)}, where it may have begun")
    gap = _gap(found)
    if gap:
        result = result.unsure(gap, *(() if stage in ("data", SETTINGS) else ("memory_states", "update")))
    return result


def _start(found: Comparison, kind: str, ranks: list[int], **others: Any) -> Result:
    return Result(kind, SURE, ranks=ranks, hosts=found.hosts(ranks),
                   pipeline_stage=found.pipeline_stage(ranks), remedy=CAUSES[kind].remedy, **others)


def _memory(found: Comparison) -> Result:
    """Parameters or states differ before the step."""
    by_weights = found.ranks_with(["weights"])
    key = "weights" if by_weights else "states"
    ranks = by_weights or found.ranks_with(["states"])
    layer, names = None, []
    if by_weights:
        positions = found.positions(ranks[0], "weights")
        layer = found.layer(ranks[0], positions[0]) if positions else None
        names = [f"layer {layer}"] if layer is not None else []
    else:
        names = found.names(ranks[0], "states")
    result = _start(found, f"memory_{key}", ranks, layer=layer,
                     evidence=[f"the {key} before the step differ on {named('rank', ranks)}"
                               + (f": {', '.join(names)}" if names else "")])
    if found.step == found.first or all(f"{key}_after" in found.before.get(rank, {}) for rank in ranks):
        after = "the checkpoint" if found.step == found.first else f"the end of step {(found.step or 1) - 1}"
        return replace(result, evidence=[*result.evidence, f"they were equal at {after}"])
    return result.unsure(f"step {(found.step or 1) - 1} has no checksums of its results: an update before this step "
                         "may have been wrong", "update", *(["memory_states"] if by_weights else []))


def _forward(found: Comparison) -> Result:
    """Outputs or losses of ranks differ."""
    ranks = found.ranks_with(_keys_of(FORWARD))
    begins = {rank: (found.coordinate(rank, "pipeline"), *found.first_output(rank)) for rank in ranks}
    # a loss alone shows no beginning: the last pipeline stage, which computes it, sends it to the others
    last = max(stage for stage, *_ in begins.values())
    begins = {rank: where for rank, where in begins.items() if where[1] < math.inf} or {
        rank: (last, *where[1:]) for rank, where in begins.items()
        if where[0] == last or not found.has("layers_forward")}
    earliest = min(where[:3] for where in begins.values())
    ranks = [rank for rank, where in begins.items() if where[:3] == earliest]
    layer = None if earliest[1] == math.inf else found.layer(ranks[0], int(earliest[1]))
    operator = begins[ranks[0]][3]
    # a layer at which all begin, with equal inputs, is where each of them was computed
    result = _start(found, "forward", ranks, layer=layer, operator=operator, direction=FORWARD)
    if not found.has("weights"):
        return result.unsure("the step has no checksums of weights and states: a change of them in memory, or a wrong "
                             "update before this step, looks the same", "memory_weights", "memory_states", "update")
    if layer is not None:
        of = f"layer {layer}" if operator is None else operator
        return replace(result, evidence=[f"weights, states, data and random numbers were equal; the output of {of} is "
                                          "the first that differs"])
    return replace(result, evidence=["weights, states, data and the outputs of all layers were equal; the loss of "
                                      f"{named('rank', ranks)} differs: the output layer or the loss"])


def _backward(found: Comparison) -> Result:
    """Gradients before the reduction differ."""
    keys = ("layers_backward", "gradient_bits", "gradients")
    ranks = found.ranks_with(keys)
    begins: dict[int, tuple[int, float]] = {}  # rank -> (minus the pipeline stage, minus the index of the last layer)
    for rank in ranks:
        num_layers = len(found.headers[rank].layers)
        # the gradient of a layer's output is computed by the layer after it
        outputs = [min(number + 1, num_layers - 1) for number in found.positions(rank, "layers_backward")]
        own = [*found.positions(rank, "gradient_bits"), *found.positions(rank, "gradients")]
        begins[rank] = (-found.coordinate(rank, "pipeline"), -max([*outputs, *own], default=0))
    earliest = min(begins.values())
    ranks = [rank for rank, where in begins.items() if where == earliest]
    layer = found.layer(ranks[0], int(-earliest[1]))
    result = _start(found, "backward", ranks, layer=layer, direction=BACKWARD)
    lines = [f"losses and outputs of all layers were equal; the gradients of layer {layer} are the first that differ, "
             f"on {named('rank', ranks)}"]
    names = found.names(ranks[0], "operators_backward")
    more = [f"the gradient of the output of {name} is the first that differs there" for name in names[:1]]
    return replace(result, evidence=[*lines, *more])


def _reduction(found: Comparison) -> Result:
    """Losses or gradients differ after the reduction."""
    ranks = found.ranks_with(["reduced"]) or found.ranks_with(_keys_of(REDUCTION))
    result = _start(found, "reduction", ranks, direction=REDUCTION)
    if not found.ranks_with(["reduced", "grad_norm"]):
        return replace(result, evidence=["the losses of all ranks were equal, and their mean differs"])
    if not found.has("gradient_bits"):
        return result.unsure("the step has no checksums of gradients: a wrong backward pass looks the same", "backward",
                             "memory_weights", "memory_states")
    after = f"; after it those on {named('rank', ranks)} differ" if found.has("reduced") else ""
    return replace(result, evidence=[f"the gradients of all ranks were equal before the reduction{after}"])


def _update(found: Comparison) -> Result:
    """Gradients are equal, and the results of the update differ."""
    skipped = found.ranks_with(["skipped"])
    ranks = skipped or found.ranks_with(["states_after"]) or found.ranks_with(["weights_after"])
    result = _start(found, "update", ranks, direction=UPDATE)
    if skipped:
        one, other = found.one[ranks[0]].get("skipped"), found.other[ranks[0]].get("skipped")
        return replace(result, evidence=[f"the run skipped the update for {one or 'no'} reason, the replay for "
                                          f"{other or 'no'} reason"])
    if not found.has("reduced"):
        return result.unsure("the step has no checksum of the reduced gradients: a change of them that the gradient "
                             "norm does not show looks the same", "reduction")
    return replace(result, evidence=[f"the reduced gradients were equal; the results of the update differ on "
                                      f"{named('rank', ranks)}"])


def _where(found: Comparison, stage: str) -> str:
    """Say where run and replay part."""
    keys = [key for key in dict.fromkeys(key for keys in found.differing.values() for key in keys)
            if key in _keys_of(stage)]
    rank = found.ranks_with(keys)[0]
    values = [f"{key} {found.one[rank][key]!s} and {found.other[rank][key]!s}" for key in keys
              if not isinstance(found.one[rank][key], (list, dict)) or key == "samples"]
    shown = f" ({'; '.join(values[:2])} on rank {rank})" if values else ""
    return f"step {found.step}, {stage}: the first values that differ are {', '.join(keys)}{shown}"


def _gap(found: Comparison) -> str:
    """Return a reason if steps before the differing one are not recorded, otherwise ""."""
    step = found.step or 0
    lost = [number for number in range(found.first, step) if number not in found.compared]
    if not lost:
        return ""
    return f"{counted(len(lost), 'step')} before it, {lost[0]} to {lost[-1]}, cannot be compared: not recorded"


def _of_repeats(number: int) -> list[str]:
    return [f"{counted(number + 1, 'replay')} agree with each other: it was a fault in the past"] if number else []


def _keys_of(stage: str) -> list[str]:
    return [key for key, (of, _) in DIGEST.items() if of == stage]


assert set(KIND_OF_STAGE) | {WEIGHTS} == set(STAGES)
