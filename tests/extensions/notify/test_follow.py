"""The process that follows a run, with folders whose rows the tests write: messages, groups, receivers that fail."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pretrain.active_extensions import around_run
from pretrain.config.flags.arguments import RunArguments
from pretrain.errors import ConfigError
from pretrain.extension import LAUNCHER, RANK_0
from pretrain.extensions.notify.extension import KINDS, Notify
from pretrain.extensions.notify.follower import metric_names
from pretrain.extensions.notify.messages import RunState
from pretrain.extensions.notify.receivers import GROUPED_S, Grouping, check_port, check_receivers, followed
from pretrain.monitor.rows import EVENTS
from pretrain.shipped import find_template
from tests.support.launch import ROOT, free_port
from tests.support.receivers import SECRET, Receivers, receivers
from tests.support.rejection import rejection
from tests.support.supervised import wait_until

RECORD = {"hardware": [{"host": "node1"}], "train_steps": 100, "flags": {"model": "gpt2"},
          "layout": {"world_size": 8, "zero_stage": 2, "precision": "bf16"}}


def given(run: Path, **flags: Any) -> RunArguments:
    """Return the arguments of a run with these flags of the extension."""
    return RunArguments(save=str(run), extensions=flags)


@pytest.fixture(scope="module")
def server() -> Iterator[Receivers]:
    with receivers() as server:
        yield server


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Receivers) -> Path:
    """Return a run folder; the variable GOOD has the URL of the receiver that records messages."""
    server.messages.clear()
    monkeypatch.setenv("GOOD", server.url("good"))
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "run.json").write_text(json.dumps([RECORD]))
    return tmp_path / "first"


def append(run: Path, name: str, *rows: dict[str, Any]) -> None:
    with open(run / name, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def event(kind: str, step: int = 0, reason: str = "", **more: Any) -> dict[str, Any]:
    return {"time": 1.0, "event": kind, "step": step, "reason": reason, **more}


def training(step: int, loss: float) -> dict[str, Any]:
    return {"step": step, "time": 1234.5, "loss": loss, "lr": 1e-3, "grad_norm": None}


def test_the_first_message_of_a_kind_is_sent_at_once_and_later_ones_in_groups() -> None:
    state, grouping = RunState(Path("runs/first")), Grouping()
    spikes = [state.message("spike", f"spike at step {step}", step=step) for step in range(20)]
    assert grouping.add(spikes[0], 0.0) == [spikes[0]]
    assert [grouping.add(spike, float(at)) for at, spike in enumerate(spikes[1:15], 1)] == [[]] * 14
    hang = state.message("hang", "hang at step 3")
    assert grouping.add(hang, 20.0) == [hang]
    assert grouping.take_due(GROUPED_S - 1) == []
    (group,) = grouping.take_due(GROUPED_S)
    assert (group.title, group.lines[0]) == ("first: 14 more: spike", "The last: spike at step 14")
    assert grouping.add(spikes[15], GROUPED_S + 1) == []  # the next group has begun
    assert grouping.take_due(GROUPED_S + 2, everything=True) == [spikes[15]]  # the end of the run
    assert grouping.add(spikes[16], 9 * GROUPED_S) == []
    grouping.take_due(10 * GROUPED_S)
    grouping.take_due(11 * GROUPED_S)
    assert grouping.add(spikes[17], 12 * GROUPED_S) == [spikes[17]]


def test_kinds_and_events_exist() -> None:
    """Each kind has an event, or is made of other files, and is on the page."""
    state = RunState(Path("runs/first"))
    messages = [state.message_of_event(event(name, step, world_size=4)) for name in EVENTS for step in (0, 7)]
    kinds = {message.kind for message in messages if message is not None}
    assert kinds | {"crash", "no_progress"} == set(KINDS)
    page = (ROOT / "pretrain/extensions/notify/README.md").read_text()
    assert [kind for kind in KINDS if f"`{kind}`" not in page] == []
    slow = state.message_of_event(event("slow_rank_over", 7, "rank 3 (host node2) is as fast as the others again"))
    assert slow is not None
    assert (slow.kind, slow.title, slow.lines[0][:6]) == ("slow_rank", "first: slow rank over at step 7", "rank 3")
    assert state.message_of_event(event("recomputation", 7, finding="off")) is None


def test_a_run_that_crashes(run: Path, server: Receivers, capfd: pytest.CaptureFixture[str],
                            monkeypatch: pytest.MonkeyPatch) -> None:
    """Receivers that fail are one warning each, and the good one gets everything in its order."""
    monkeypatch.setenv("BAD", " ".join(server.url(name) for name in ("error", "close", "refused")))
    args = given(run, notify=["GOOD", "$BAD"], notify_command=f"cat > {run}/$DS_PRETRAIN_EVENT; exit 3")
    append(run, "events.jsonl", event("spike", 1))  # an earlier start
    with around_run(args, RANK_0, active=False):  # as the other ranks do
        assert not {"GOOD", "BAD"} & os.environ.keys()
    with contextlib.suppress(RuntimeError), followed(args, RANK_0):
        append(run, "events.jsonl", event("start", 0, world_size=8))
        append(run, "metrics.jsonl", training(41, 3.25))
        wait_until(lambda: len(server.messages) == 1)
        append(run, "events.jsonl", event("spike", 41, "loss 9.1, 7.2 standard deviations above 3.2"))
        raise RuntimeError("boom")
    assert server.titles() == ["first: trains", "first: spike at step 41", "first: crashed"]
    assert [message["type"] for message in server.messages] == ["info", "warning", "failure"]
    assert server.messages[1]["message"].splitlines()[:2] == ["loss 9.1, 7.2 standard deviations above 3.2",
                                                              "step 41/100, loss 3.2500, host node1"]
    assert server.messages[2]["message"].startswith("RuntimeError: boom\n")
    assert (run / "crash").read_text().startswith("first: crashed\nRuntimeError: boom\n")
    stderr = capfd.readouterr().err
    assert SECRET not in stderr
    warnings = [line.split(": ")[2] for line in stderr.splitlines() if " a message about the run " in line]
    assert sorted(warnings) == ["--notify BAD", "--notify_command"], stderr


@pytest.mark.parametrize(("owner", "rows", "code", "titles"), [
    (LAUNCHER, [event("start"), event("hang", 5, "rank 1 is stopped"), event("start", 4), event("stop", 9, "finished")],
     0, ["trains", "hang at step 5", "trains again from step 4", "finished"]),
    (LAUNCHER, [event("start"), event("start", 0)], 137, ["trains", "trains again from step 0", "crashed"]),
    (LAUNCHER, [], 2, ["ended"]),
])
def test_how_a_run_ends(owner: str, rows: list[dict[str, Any]], code: int, titles: list[str],
                        run: Path, server: Receivers) -> None:
    with followed(given(run, notify=["GOOD"]), owner) as report:
        append(run, "events.jsonl", *rows)
        report(code)
    assert server.titles() == [f"first: {title}" for title in titles]


def test_the_owner_is_killed_and_before_that_nothing_happens_for_long(run: Path, server: Receivers) -> None:
    """The next start may need the port before the last message has been sent to a receiver that does not answer."""
    port = free_port()
    script = ("import sys, time; from pretrain.config.flags.arguments import RunArguments; "
              "from pretrain.extensions.notify.receivers import followed\n"
              f"with followed(RunArguments(save={str(run)!r}, extensions=dict(notify=['GOOD', 'SLOW'], "
              f"notify_silence=0.01, notify_on=['no_progress,crash'], metrics_port={port})), 'ds-pretrain'): "
              "time.sleep(900)")
    owner = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(ROOT),
                                                                  "SLOW": server.url("slow")})
    wait_until(lambda: len(server.messages) == 1)
    append(run, "events.jsonl", event("start"))  # a kind that is not sent
    time.sleep(0.6)
    owner.kill()
    owner.wait()
    wait_until(lambda: server.titles()[-1] == "first: ds-pretrain has ended")
    check_port(Notify(metrics_port=port))
    assert "first: no progress for 0.0" in server.titles()[0]


def test_the_process_needs_little_memory() -> None:
    """It stays for weeks on each host that starts a run."""
    code = ("import sys; import pretrain.extensions.notify.follower; "
            "print(sorted({'torch', 'deepspeed', 'numpy'} & sys.modules.keys()))")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def scrape(port: int, address: str = "127.0.0.1") -> dict[tuple[str, ...], float]:
    """Return (name, values of the labels in the order of their names) -> value."""
    with urllib.request.urlopen(f"http://{address}:{port}/metrics") as answer:
        text = answer.read().decode()
    return {(sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text) for sample in family.samples}


@pytest.mark.parametrize("address", [None, "::1"])
def test_metrics(address: str | None, run: Path) -> None:
    port, host = free_port(), f"[{address}]" if address else "127.0.0.1"
    append(run, "metrics.jsonl", *(training(step, 5.0) for step in range(1, 4)))
    append(run, "events.jsonl", event("start"), event("spike", 2))
    args = given(run, metrics_port=port, metrics_address=address)
    with followed(args, RANK_0):
        append(run, "metrics.jsonl", training(50, 2.5),
               {"step": 50, "time": 2, "split": "valid/code", "eval_loss": 2.0},
               {"step": 50, "time": 2, "split": "tasks/arc", "acc": 0.5, "questions": 9})
        append(run, "events.jsonl", event("spike", 50), event("slow_rank_over", 50))
        found: dict[tuple[str, ...], float] = {}

        def is_complete() -> bool:
            try:
                found.update(scrape(port, host))
            except OSError:
                return False
            return found.get(("ds_pretrain_events_total", "slow_rank_over")) == 1

        wait_until(is_complete, lambda: found)
        found = scrape(port, host)
    assert {name for name, *_ in found} <= metric_names()
    expected = {("ds_pretrain_step",): 50, ("ds_pretrain_loss",): 2.5, ("ds_pretrain_lr",): 1e-3,
                ("ds_pretrain_time",): 1234.5, ("ds_pretrain_train_steps",): 100,
                ("ds_pretrain_eval_loss", "valid/code"): 2,
                ("ds_pretrain_events_total", "spike"): 1, ("ds_pretrain_events_total", "hang"): 0}
    assert {key: found.get(key) for key in expected} == expected
    assert ("ds_pretrain_grad_norm",) not in found  # null
    assert ("ds_pretrain_run_info", str(run), "node1", "gpt2", "bf16", "first", "8", "2") in found


def test_every_query_of_the_dashboard_and_of_the_alerts_names_a_metric() -> None:
    dashboard = json.loads(find_template("grafana").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    alerts = (ROOT / "pretrain/extensions/notify/README.md").read_text()
    names = re.findall(r"ds_pretrain_\w+", "\n".join([*queries, alerts]))
    assert len(queries) >= 10
    assert set(names) <= metric_names()


@pytest.mark.parametrize(("flags", "words"), [
    ({"notify": [f"slack://{SECRET}/x"]}, "--notify: it takes the name of an environment variable, not a URL"),
    ({"notify": ["EMPTY"]}, "--notify: the environment variable EMPTY is empty or not set"),
    ({"notify": ["WRONG"]}, "--notify: the variable WRONG holds no URL that apprise knows"),
    ({"notify": ["GOOD"], "notify_on": ["spike,hnag"]}, '--notify_on: found hnag; expected'),
    ({"notify_on": ["spike"]}, "--notify_on: it has no effect without --notify or --notify_command"),
    ({"metrics_address": "::"}, "--metrics_address: it has no effect without --metrics_port"),
    ({"metrics_port": 9, "metrics_address": "no.such.host.invalid"}, "--metrics_address: 'no.such.host.invalid' is no"),
])
def test_wrong_receivers(flags: dict[str, Any], words: str, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.setenv("WRONG", f"slcak://{SECRET}")
    caught = rejection(check_receivers, given(run, **flags))
    assert caught.startswith(words)
    assert SECRET not in caught
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    if "notify" in flags and "notify_on" not in flags:
        check_receivers(given(run, **flags))  # other ranks need no variable


@pytest.mark.parametrize(("flags", "module", "words"), [
    ({"notify": ["GOOD"]}, "apprise", "the package apprise is not installed. Run `pip install 'ds-pretrain[notify]'`"),
    ({"metrics_port": 9100}, "prometheus_client", "the package prometheus-client is not installed. Run `pip"),
])
def test_a_missing_package(flags: dict[str, Any], module: str, words: str, run: Path,
                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == module else 1)
    with pytest.raises(ConfigError, match="not installed") as caught:
        check_receivers(given(run, **flags))
    assert words in str(caught.value)


def test_a_port_that_is_in_use(server: Receivers, run: Path) -> None:
    port = int(server.url("good").split(":")[-1].split("/")[0])
    with pytest.raises(ConfigError, match=rf"--metrics_port: port {port} of 127.0.0.1 cannot be used: Address already"):
        check_port(Notify(metrics_port=port))
    with pytest.raises(ConfigError, match="Cannot assign requested address"):
        check_port(Notify(metrics_port=free_port(), metrics_address="192.0.2.1"))
