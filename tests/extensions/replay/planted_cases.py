"""The faults that planted_replays.py plants into runs, in each of four layouts, and the right answers about them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.extensions.replay.planted_documents import REMARKS
from tests.support.cases import CPU, config

TRAINED = 80  # steps of the common checkpoint: documents stand out for a trained model only
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # ranks, DeepSpeed JSON
    "zero1": (3, config(1, micro=3, accumulation=2, lr=3e-3)),
    "zero3_offload": (3, config(3, precision="bf16", micro=3, accumulation=2, lr=3e-3, offload_optimizer=CPU)),
    "pipeline": (4, config(1, precision="bf16", micro=2, accumulation=4, lr=3e-3, stages=2)),
    "tensor": (4, {**config(1, micro=4, accumulation=2, lr=3e-3), "tensor_parallel": {"autotp_size": 2}}),
}
BATCHES = {"zero1": 18, "zero3_offload": 18, "pipeline": 16, "tensor": 16}
PLAIN = "plain"  # the run without a fault
TWICE = [{"name": "replay_1"}, {"name": "replay_2"}]
# rows that are not among the 25 cases of a layout
SPARSE, HEALTHY = "beyond: fault in a step without checksums", "beyond: no fault"


@dataclass(frozen=True)
class Planted:
    """A case: a fault in the run, one in the replays, and the right result."""

    name: str
    group: str  # row of the table
    kind: str  # kind of the right result
    plant: dict[str, Any] | None = None
    rank: int | None = None  # that a right result names
    step: int | None = None  # as well
    layer: str | None = None
    operator: str | None = None
    unsure: bool = False  # no more can be known
    poison: str = ""  # kind of the planted document of step TRAINED + 1
    replays: Sequence[dict[str, Any]] = ()  # own ones: see replay_worker.py
    flags: dict[str, Any] = field(default_factory=dict)
    lr: float = 3e-3
    edit: str = ""  # how a file of the data is changed after the run: "cut" or "changed"
    note: str = ""  # a part of a note of a right answer


def planted_cases(layout: str, trained: int = TRAINED) -> list[Planted]:
    """Return the 25 cases of a layout; then 2 in steps without checksums, and the run without a fault."""
    ranks = LAYOUTS[layout][0]
    fault, later, last = trained + 2, trained + 3, ranks - 1

    def block(rank: int) -> str:
        return "3" if layout == "pipeline" and rank >= 2 else "2"

    def operator(rank: int, step: int = fault, inside: str = "", **more: Any) -> dict[str, Any]:
        return {"kind": "operator", "rank": rank, "step": step, "name": block(rank) + inside, **more}

    def case_of(name: str, group: str, kind: str, values: dict[str, Any], layer: bool = True, **more: Any) -> Planted:
        rank = values.get("rank")
        place = values["name"] if values["kind"] == "operator" and "." in values["name"] else None
        more = {"plant": values, "rank": rank, "step": values["step"], "operator": place, **more}
        return Planted(name, group, kind, layer=block(rank or 0) if layer else None, **more)

    def weight(name: str, rank: int, bit: int, **more: Any) -> Planted:
        return case_of(name, more.pop("group", "bit flipped in a weight"), "memory_weights", {
            "kind": "weight", "rank": rank, "step": fault, "name": f"{block(rank)}.mlp.up.weight", "bit": bit}, **more)

    def state(name: str, rank: int, of: str, bit: int) -> Planted:
        return case_of(name, "bit flipped in an optimizer state", "memory_states", {
            "kind": "state", "rank": rank, "step": fault, "name": of, "bit": bit}, layer=False)

    def reduced(name: str, rank: int, bit: int, step: int = fault) -> Planted:
        return case_of(name, "bit flipped in a gradient during the reduction", "reduction", {
            "kind": "reduced", "rank": rank, "step": step, "bit": bit}, layer=False)

    def once(name: str, values: dict[str, Any], kind: str = "forward", **more: Any) -> Planted:
        return case_of(name, more.pop("group", "operator wrong once"), kind, values, **more)

    def lr(name: str, step: int, value: float) -> Planted:
        return case_of(name, "learning rate changed by hand", "settings_changed",
                       {"kind": "lr", "step": step, "value": value}, layer=False)

    plants = [operator(1, inside=".attention.out", value=value) for value in (0.5, 0.7)]
    always, is_decided = operator(1, persistent=True), layout.startswith("zero")
    return [
        *(Planted(f"poison_{poison}", f"poisoned document: {REMARKS[poison]}", "reproducible", poison=poison,
                  replays=[{"name": "replay_1", "examine": True}, {"name": "cross", "cross_check": True}])
          for poison in REMARKS),
        weight("weight_high", 0, -4), weight("weight_low", last, 3), weight("weight_sign", 1, -1),
        state("state_first", 0, "exp_avg", 25), state("state_second", last, "exp_avg_sq", 20),
        state("state_low", 1, "exp_avg", 5),
        reduced("reduced_high", 0, -5), reduced("reduced_low", last, 2), reduced("reduced_sign", 1, -1, later),
        case_of("gradient", "bit flipped in a gradient before the reduction", "backward", {
            "kind": "gradient", "rank": 1, "step": fault, "name": f"{block(1)}.mlp.up.weight", "bit": 10}),
        once("operator_large", operator(0, inside=".attention.qkv", value=3.0)),
        once("operator_small", operator(last, value=0.05)),
        once("operator_late", operator(1, later, inside=".mlp.down")),
        once("flaky", operator(1, inside=".attention.out"), group="operator wrong now and then",
             replays=[{"name": f"replay_{number}", "plant": each} for number, each in enumerate(plants, 1)]),
        once("always", always, "wrong_rank", group="operator always wrong", unsure=not is_decided, replays=[
            {"name": "replay_1", "plant": always}, {"name": "cross", "plant": always, "cross_check": True}]),
        once("was_always", operator(0, persistent=True), group="operator always wrong, on a host that is gone"),
        lr("lr_higher", fault, 3.0), lr("lr_little", later, 1.001),
        Planted("lr_of_start", "learning rate of the JSON changed between starts", "reproducible", lr=1e-3,
                flags={"override": "lr"}, note="from 0.003 to 0.001", replays=[
                    {"name": "replay_1"}, {"name": "cross", "cross_check": True}]),
        once("random", {"kind": "random", "rank": last, "step": fault}, "random_state", layer=False,
             group="a random number drawn"),
        Planted("truncated", "blend source cut after the run", "data_changed", edit="cut"),
        Planted("changed", "blend source changed on the disk after the run", "data_changed", edit="changed"),
        weight("sparse_weight", 1, -4, group=SPARSE, flags={"flight_interval": 10}, unsure=True),
        once("sparse_operator", operator(1), group=SPARSE, flags={"flight_interval": 10}, unsure=True),
        Planted(PLAIN, HEALTHY, "reproducible", replays=[*TWICE, {"name": "cross", "cross_check": True}]),
    ]
