"""The data position of a step, from the files of a run folder."""

import json
from pathlib import Path

from pretrain.extensions.inspect.main import find_step


def test_steps_before_and_after_a_change_of_the_batch(tmp_path: Path) -> None:
    """A resume after step 15 changed the batch from 8 to 16 samples. The run logs every tenth step."""
    starts = [{"flags": {}, "batch": {"global_batch_size": size}} for size in (8, 16)]
    (tmp_path / "run.json").write_text(json.dumps(starts))
    events = [{"event": "start", "step": step} for step in (0, 15)]
    rows = [{"step": 10, "loss": 1.0, "consumed_samples": 80},
            {"step": 20, "loss": 1.0, "consumed_samples": 15 * 8 + 5 * 16}]
    for name, lines in (("events.jsonl", events), ("metrics.jsonl", rows)):
        (tmp_path / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    positions = {step: find_step(tmp_path, step).consumed_samples for step in (1, 10, 11, 15, 16, 17, 20)}
    assert positions == {1: 0, 10: 72, 11: 80, 15: 112, 16: 120, 17: 136, 20: 184}
    assert find_step(tmp_path, 15).start == starts[0]
