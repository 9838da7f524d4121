"""The supervisor does not restart a run that was stopped because of its losses."""

import json
from pathlib import Path

import pytest

from tests.distributed.resilience.test_bad_steps import DATA2, INTERVAL, STEPS
from tests.support.cases import config, flags
from tests.support.launch import ROOT, free_port
from tests.support.supervised import read_restart_log, supervise, wait_for_end


@pytest.mark.slow
def test_the_supervisor_does_not_restart_a_run_that_the_guard_has_stopped(corpus: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(config(0, lr=1e4, **DATA2)))
    words = {**flags(corpus, layers=2, steps=STEPS), "deepspeed_config": tmp_path / "ds.json", "max_rollbacks": 1,
             "save": tmp_path / "run", "save_interval": INTERVAL}
    command = ["deepspeed", "--num_accelerators", "2", "--master_port", str(free_port()),
               str(ROOT / "pretrain" / "train.py"), *(f"--{key}={value}" for key, value in words.items())]
    with open(tmp_path / "log", "w", encoding="utf-8") as log:
        code, _ = wait_for_end(supervise(["--", *command], stdout=log, stderr=log))
    assert code == 76, (tmp_path / "log").read_text()[-3000:]
    starts, summaries = read_restart_log(tmp_path / "run")
    assert [row["exit_code"] for row in starts] == [76]
    assert summaries[0]["summary"] == "stopped by the bad-step guard"
