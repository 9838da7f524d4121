"""Layout of a DeepSpeed JSON that was written for another program."""

import pytest

from pretrain.config.lenient import lenient_layout


def test_auto_values_are_filled_and_unknown_keys_noted() -> None:
    config = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"},
              "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto", "reduce_bucket_size": "auto",
                                    "sub_group_size": 1e9, "offload_optimizer": {"device": "cpu"}},
              "made_up": True, "zero_optimisation": {"stage": 1}}
    layout = lenient_layout(config, world_size=8, hidden_size=1024)
    assert (layout.zero_stage, layout.precision, layout.micro_batch_size) == (3, "bf16", 8)
    assert (layout.reduce_bucket_size, layout.prefetch_bucket_size) == (1024**2, int(0.9 * 1024**2))
    assert (layout.sub_group_size, layout.offload_optimizer, layout.overlap_comm) == (10**9, "cpu", True)
    assert any("zero_optimisation" in note for note in layout.notes)
    assert any("made_up" in note for note in layout.notes)


@pytest.mark.parametrize(("old", "block", "device"), [
    (True, True, "cpu"), (True, {"device": "auto"}, "cpu"), (True, {"pin_memory": False}, "cpu"),
    ("auto", None, "none"), (False, None, "none"), (False, {"device": "cpu"}, "cpu"),
])
def test_the_old_key_cpu_offload_is_read(old: object, block: object, device: str) -> None:
    zero = {"stage": 2, "cpu_offload": old, **({} if block is None else {"offload_optimizer": block})}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    assert lenient_layout(config, world_size=2).offload_optimizer == device


@pytest.mark.parametrize("total", ["see note", [1], {"a": 1}, True])
def test_a_batch_size_that_is_not_a_number_gets_a_note(total: object) -> None:
    config = {"train_batch_size": total, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    layout = lenient_layout(config, world_size=2)
    assert (layout.micro_batch_size, layout.gradient_accumulation_steps, layout.global_batch_size) == (2, 3, 12)
    assert any("train_batch_size" in note for note in layout.notes)
