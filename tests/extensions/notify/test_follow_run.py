"""A run under the supervisor with a spike, a kill and receivers that fail: its messages, metrics and secrets."""

import json
import sys
from pathlib import Path

import psutil

from tests.extensions.notify.test_follow import scrape
from tests.support.cases import config, flags
from tests.support.launch import WORKERS, free_port, rank_environment
from tests.support.receivers import SECRET, receivers
from tests.support.supervised import read_restart_log, rows, supervise, wait_for_end, wait_until

STEPS, SPIKE_AT = 60, 14
BATCH = 4


def test_a_supervised_run_tells_what_happens_and_keeps_its_secrets(corpus: str, tmp_path: Path) -> None:
    run, port = tmp_path / "run", free_port()
    (tmp_path / "ds.json").write_text(json.dumps(config(1, micro=2, accumulation=2)))
    (tmp_path / "faults.json").write_text(json.dumps({"factors": {(SPIKE_AT - 1) * BATCH: "100"}}))
    (tmp_path / "train.py").write_text(
        f"import runpy, sys; sys.argv[1:1] = [{str(tmp_path / 'faults.json')!r}]; "
        f"runpy.run_path({str(WORKERS / 'faulty_train.py')!r}, run_name='__main__')")
    words = {**flags(corpus, layers=2, steps=STEPS), "deepspeed_config": tmp_path / "ds.json", "save": run,
             "log_interval": 1, "save_interval": 10, "keep_checkpoints": 2, "spike_window": 16, "metrics_port": port,
             "notify_command": f"cat >> {tmp_path}/told; echo {SECRET}; ps axww >> {tmp_path}/processes"}
    command = [sys.executable, str(tmp_path / "train.py"), *(f"--{key}={value}" for key, value in words.items()),
               "--notify", "GOOD_URL", "DS_BAD_URLS"]
    with receivers() as server, open(tmp_path / "log", "w", encoding="utf-8") as log:
        environ = {**rank_environment(0, 1, free_port()), "GOOD_URL": server.url("good"),
                   "DS_BAD_URLS": " ".join(map(server.url, ("slow", "error", "close", "refused")))}
        process = supervise(["--", *command], environ=environ, stdout=log, stderr=log)
        wait_until(lambda: any("spike" in title for title in server.titles()) or process.poll() is not None)
        (rank,) = [child for child in psutil.Process(process.pid).children()
                   if str(tmp_path / "train.py") in child.cmdline()]
        wait_until(lambda: len(rows(run)) >= 22 or not rank.is_running())
        before = scrape(port)
        rank.kill()
        wait_until(lambda: any("trains again" in title for title in server.titles()) or process.poll() is not None)
        after = scrape(port)  # served by the same process
        code, _ = wait_for_end(process)
    output = (tmp_path / "log").read_text()
    assert code == 0, output[-3000:]
    assert [row["exit_code"] for row in read_restart_log(run)[0]] == [-9, 0]
    kinds = [title.removeprefix("run: ") for title in server.titles()]
    assert kinds[0] == "trains"
    assert f"spike at step {SPIKE_AT}" in kinds
    others = [kind for kind in kinds if "spike" not in kind]
    assert others == ["trains", "start 1 ended", others[-2], "finished"], kinds
    assert others[-2].startswith("trains again from step ")
    assert kinds.count(f"spike at step {SPIKE_AT}") == 1  # one for the loss and the gradient norm
    crash = next(message["message"] for message in server.messages if "start 1" in message["title"])
    assert crash.startswith("crash: SIGKILL (exit code -9); newest checkpoint: step ")
    assert before["ds_pretrain_step",] >= SPIKE_AT
    assert before["ds_pretrain_events_total", "spike"] >= 1
    assert after["ds_pretrain_events_total", "start"] == 2
    assert output.count("--notify DS_BAD_URLS: a message about the run was not accepted") == 1
    assert (tmp_path / "told").read_text().count("\nstep ") >= 4
    processes = (tmp_path / "processes").read_text()
    assert "pretrain.extensions.notify.follower" in processes
    assert server.url("good")[:30] not in processes
    for path in [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "processes"]:
        assert SECRET.encode() not in path.read_bytes(), path
