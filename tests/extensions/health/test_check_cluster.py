"""`ds-pretrain check-cluster`: the evaluation of measurements, and runs of the tool on hosts with real faults.

The hosts are network namespaces with their own host names, links and mounts. A switch in another namespace connects
the hosts. The faults are a token bucket filter on a link, a tiny tmpfs, and a blackhole route.
"""

import json
import os
import pickle
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from threading import Barrier

import psutil
import pytest
import torch

from pretrain.cluster.hosts.preflight import PreflightRequest
from pretrain.cluster.hosts.rendezvous import Rendezvous, join_rendezvous
from pretrain.distributed.tcp_store import (
    SECRET_VARIABLE,
    ForeignValueError,
    _signature,
    decode_value,
    encode_value,
    wait_for_port,
)
from pretrain.extensions.health.check import RankLocation, RankResult, ranks_by_host
from pretrain.extensions.health.devices import DeviceHealth, device_health
from pretrain.extensions.health.findings import (
    faulty_hosts,
    report_connections,
    report_devices,
    report_links,
    slow_indices,
)
from pretrain.extensions.health.network import (
    ClockServer,
    ConnectionResult,
    Link,
    choose_evenly,
    measure_connection,
    partner_of,
    round_robin,
)
from pretrain.extensions.health.report import ClusterReport
from tests.cluster.workers.packages import PATH, need_packages
from tests.cluster.workers.ssh_hosts import add_host, add_namespace
from tests.support.launch import LIMIT_S, PROGRAM, ROOT, free_port, rank_environment, run_ranks
from tests.support.supervised import wait_until

SMALL = ["--product_size", "128", "--memory_mib", "4", "--message_mib", "1", "--disk_mib", "2", "--timeout", "300"]


# ---- evaluation of measurements


@pytest.mark.parametrize("count", [2, 3, 4, 7, 16])
def test_round_robin_has_each_pair_once_and_each_host_at_most_once_per_round(count: int) -> None:
    rounds = round_robin(count)
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(count), 2))
    assert all(len({host for pair in pairs for host in pair}) == 2 * len(pairs) for pairs in rounds)
    assert len(rounds) == count - 1 + count % 2
    assert len(choose_evenly(rounds, 3)) == min(3, len(rounds))


def test_partners_have_the_same_index_on_their_hosts() -> None:
    hosts = [[0, 1], [2, 3], [4]]
    assert [partner_of(rank, [(0, 1)], hosts) for rank in range(5)] == [2, 3, 0, 1, None]
    assert [partner_of(rank, [(0, 2)], hosts) for rank in range(5)] == [4, None, None, None, 0]


def test_outliers_are_values_far_below_the_upper_median() -> None:
    assert slow_indices([1.0, 0.9, 1.1, 0.5], 0.8) == [3]
    assert slow_indices([1.0, 0.5], 0.8) == [1]
    assert slow_indices([1.0, 0.85, 0.9], 0.8) == []
    assert faulty_hosts({("a", "d"), ("b", "d"), ("c", "d"), ("a", "b")}) == [
        (("d",), [("a", "d"), ("b", "d"), ("c", "d")]), (("a", "b"), [("a", "b")])]


def _links(hosts: str, slow_hosts: str) -> dict[tuple[str, str], list[Link]]:
    return {(a, b): [Link(10.0 if {a, b} & set(slow_hosts) else 1.0, 10**9, 10.0, False)] * 2
            for a, b in combinations(hosts, 2)}


@pytest.mark.parametrize(("hosts", "bad"), [("abc", "b"), ("abcd", "d"), ("abcd", "cd"), ("abcdefgh", "ae")])
def test_slow_hosts_are_distinguished_from_their_partners(hosts: str, bad: str) -> None:
    report = ClusterReport(ranks=len(hosts), hosts={host: {} for host in hosts})
    report_links(report, _links(hosts, bad), None, 0.0)
    assert {finding.where for finding in report.findings} == set(bad)


def test_two_hosts_are_compared_with_the_required_minimum_only() -> None:
    report = ClusterReport(ranks=2, hosts={"a": {}, "b": {}})
    report_links(report, _links("ab", "b"), None, 0.0)
    assert report.findings == []
    report_links(report, _links("ab", "b"), None, 5.0)
    assert [str(each) for each in report.findings] == [
        "a and b: network of 1.6 Gbit/s with each other; expected at least 5 Gbit/s"]


def test_wrong_products_and_slow_devices_are_named_with_their_rank() -> None:
    report = ClusterReport(ranks=3, hosts={"a": {}, "b": {}})
    good = DeviceHealth(100.0, 2**33, 50.0, ())
    report_devices(report, {"a": [0, 1], "b": [2]}, None,
                  [good, DeviceHealth(60.0, 2**33, 50.0, ()), DeviceHealth(100.0, 2**33, 50.0, ("wrong product",))])
    assert [str(each) for each in report.findings] == [
        "b: rank 2: wrong product",
        "a: rank 1: matrix products of 60 TFLOP/s; the median is 100, expected at least 80% of it"]


def test_one_wrong_element_of_one_matrix_product_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = torch.Tensor.__matmul__, []

    def wrong_once(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = original(a, b)
        calls.append(product.shape)
        if product.shape == (96, 96) and calls.count(product.shape) == 3:
            product[17, 5] += 1
        return product

    assert device_health(96, 2**20).problems == ()
    monkeypatch.setattr(torch.Tensor, "__matmul__", wrong_once)
    assert device_health(96, 2**20).problems == ("wrong result in 1 of 6 matrix products",)


def test_a_wrong_clock_is_measured_and_reported() -> None:
    server = ClockServer("127.0.0.1", lambda: time.time() + 5.0)
    try:
        result = measure_connection(("127.0.0.1", server.port))
    finally:
        server.close()
    assert result.clock_offset_s == pytest.approx(5.0, abs=2.0)  # on a busy machine, a clock may be read late
    ahead = replace(result, clock_offset_s=5.0)
    equal = ConnectionResult(1e-4, 0.0)
    report = ClusterReport(ranks=3)  # the clock of rank 0's host is wrong
    report_connections(report, {"a": [0], "b": [1], "c": [2]}, 1.0,
                [{"b": equal, "c": equal}, {"a": ahead, "c": equal}, {"a": ahead, "b": equal}])
    (finding,) = report.findings
    assert finding.where == "a"
    assert "5 s ahead" in finding.text
    assert measure_connection(("127.0.0.1", server.port)).error  # the server has been closed above


def test_hosts_with_equal_names_stay_separate() -> None:
    locations = [RankLocation("node", local, "", 0) for local in (0, 1, 0, 1)]
    assert ranks_by_host(locations) == {"node": [0, 1], "node#2": [2, 3]}


# ---- real hosts


class Switch:
    """Hosts h0 to h3 with the addresses 10.0.0.1 to 10.0.0.4. Each host is a network namespace.

    The names of the namespaces contain the id of this process.
    """

    def __init__(self, stack: ExitStack) -> None:
        self.prefix = f"hc{os.getpid()}"
        self.port = free_port()  # unique per test, because DeepSpeed uses the port in names of files in /dev/shm
        switch = f"{self.prefix}switch"
        add_namespace(switch, stack)
        subprocess.run(["ip", "-n", switch, "link", "add", "bridge", "up", "type", "bridge"], check=True,
                       capture_output=True, text=True)
        for number in range(4):
            add_host(f"{self.prefix}h{number}", "eth0", f"10.0.0.{number + 1}", link=f"port{number}", bridge="bridge",
                     stack=stack, switch=switch)

    def check(self, folder: Path, flags: list[str], setups: list[str], *, per_host: int = 1,
              environ: dict[str, str] | None = None) -> list[subprocess.CompletedProcess[str]]:
        """Start the tool on every rank, as a launcher would. `setups` has one shell command per host, which runs first.
        """
        host = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": str(self.port), "GLOO_SOCKET_IFNAME": "eth0",
                "LOCAL_SIZE": str(per_host), "LOCAL_WORLD_SIZE": str(per_host)}
        hosts = [{"namespace": f"{self.prefix}h{number}", "name": f"h{number}", "setup": setup, "path": PATH,
                  "environ": {**host, "LOCAL_RANK": str(local)}}
                 for number, setup in enumerate(setups) for local in range(per_host)]
        command = [str(ROOT / "tests/cluster/workers/as_host.py"), PROGRAM, "check-cluster",
                   "--save", str(folder), *flags]
        ranks = 1 if environ else len(hosts)
        logs = folder.parent / f"{folder.name}-logs"
        logs.mkdir()
        done = run_ranks(command, ranks, cwd=logs, environ={"HOSTS": json.dumps(hosts), **(environ or {})})
        for each in done:  # torch warns that 10.0.0.x has no host name, before the tool sets the log level
            each.stdout = "".join(line for line in each.stdout.splitlines(True) if "[c10d] The hostname" not in line)
        return done


@pytest.fixture
def switch() -> Iterator[Switch]:
    need_packages("simulated hosts", {"ip": "iproute2"})
    with ExitStack() as stack:
        try:
            made = Switch(stack)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"this machine cannot create network namespaces: {getattr(error, 'stderr', error)}")
        yield made


def _findings(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line.removeprefix("BAD  ") for line in done.stdout.splitlines() if line.startswith("BAD")]


@pytest.mark.root
def test_slow_link_full_disk_and_too_small_disk_are_reported(switch: Switch, corpus: str, tmp_path: Path) -> None:
    run = ["--deepspeed_config", str(ROOT / "ds_configs" / "zero2_bf16.json"), "--model", "tiny", "--train_data",
           corpus, "--seq_length", "64", "--micro_batch_size", "1", "--gradient_accumulation_steps", "1",
           "--learning_rate", "1e-3", "--train_steps", "5", "--split", "80,20,0"]
    folder = tmp_path / "run"
    folder.mkdir()
    # the slow link has a fiftieth of the rate that the others reach on a busy machine
    done = switch.check(folder, [*SMALL, "--min_ratio", "0.05", *run], [
        "", f"mount -t tmpfs -o size=1m none {folder}", f"mount -t tmpfs -o size=8m none {folder}",
        "tc qdisc add dev eth0 root tbf rate 12mbit burst 32kb latency 500ms"])
    assert [each.returncode for each in done] == [1] * 4, [each.stdout for each in done]
    bad = [line for line in _findings(done[0]) if "latency of" not in line]  # latency depends on this machine's load
    assert [line.split(":")[0] for line in bad] == ["h1", "h2", "h3"], done[0].stdout
    assert "No space left on device" in bad[0]
    assert "GB are free; a checkpoint needs" in bad[1]
    assert "network of" in bad[2]
    assert "with h0, h1, h2" in bad[2]
    rows = {line.split()[0]: line for line in done[0].stdout.splitlines() if line[:1] == "h" and line[1:2].isdigit()}
    assert all("<<" in rows[name] for name in ("h1", "h2", "h3")), done[0].stdout
    assert [each.stdout for each in done[1:]] == [""] * 3
    assert list(folder.iterdir()) == []


@pytest.mark.root
def test_json_report_of_a_healthy_cluster(switch: Switch, tmp_path: Path) -> None:
    done = switch.check(tmp_path / "run", [*SMALL, "--min_ratio", "0.001", "--json"], ["", ""], per_host=2)
    assert [each.returncode for each in done] == [0] * 4, done[0].stdout
    report = json.loads(done[0].stdout)
    assert report["ok"]
    assert report["findings"] == []
    assert list(report["hosts"]) == ["h0", "h1"]
    assert report["hosts"]["h0"].keys() == {"matrix products", "free memory", "memory", "all-reduce inside the host",
                                            "network", "latency", "disk"}
    assert all(number > 0 for row in report["hosts"].values() for number in row.values())
    assert [link["hosts"] for link in report["links"]] == [["h0", "h1"]]
    assert report["collectives"].keys() == {"all-reduce", "all-gather"}


@pytest.mark.root
def test_hosts_that_cannot_connect_are_reported(switch: Switch, tmp_path: Path) -> None:
    done = switch.check(tmp_path / "run", [*SMALL, "--min_ratio", "0.001"], ["", "ip route add blackhole 10.0.0.3", ""])
    assert [each.returncode for each in done] == [1] * 3, done[0].stdout
    (bad,) = _findings(done[0])
    assert bad.startswith("h1 and h2: no TCP connection with each other")
    assert "no transfers were measured" in done[0].stdout


@pytest.mark.root
def test_without_a_network_both_hosts_report_and_exit(switch: Switch, tmp_path: Path) -> None:
    setups = ["", "ip link set eth0 down"]
    (first,) = switch.check(tmp_path / "first", ["--timeout", "1"], setups, environ={"RANK": "0", "WORLD_SIZE": "2"})
    (second,) = switch.check(tmp_path / "second", ["--timeout", "1"], setups, environ={"RANK": "1", "WORLD_SIZE": "2"})
    assert (first.returncode, second.returncode) == (1, 1), (first, second)
    assert _findings(first) == ["rank 1: rank 1 of 2 did not answer for 7 s (start); other ranks started on h0"]
    assert second.stdout.startswith(f"ds-pretrain: error: h1: no connection to rank 0 at 10.0.0.1:{switch.port}")
    assert len(second.stdout.splitlines()) == 1


# ---- hostile programs on the network


class Payload:
    """An object whose pickle runs a shell command when it is loaded."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (self.command,)


def _start_rank(rank: int, port: int, folder: Path) -> "subprocess.Popen[str]":
    """Start one of two ranks of the tool. The attacker acts as the other rank."""
    environ = {**rank_environment(rank, 2, port), "LOCAL_RANK": "0", SECRET_VARIABLE: "a secret of this start"}
    return subprocess.Popen([sys.executable, PROGRAM, "check-cluster", *SMALL, "--save", str(folder)],
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_pickle_of_another_program_is_reported_and_not_run(victim: int, tmp_path: Path) -> None:
    port, executed = free_port(), tmp_path / "executed"
    store = partial(torch.distributed.TCPStore, "127.0.0.1", port, 2, wait_for_workers=False)
    attacker = store(is_master=True) if victim == 1 else None
    with _start_rank(victim, port, tmp_path / "run") as process:
        if victim == 0:
            assert wait_for_port("127.0.0.1", port, LIMIT_S)
            listening = [each.laddr.ip for each in psutil.Process(process.pid).net_connections(kind="inet")
                         if each.status == psutil.CONN_LISTEN]
            assert {*listening} == {"127.0.0.1"}
            attacker = store(is_master=False)
        key = "start: rank 1" if victim == 0 else "start: answer of rank 0"
        attacker.set(f"check_cluster/{key}", pickle.dumps(Payload(f"touch '{executed}'")))
        output = process.communicate(timeout=LIMIT_S)[0]
    assert process.returncode == 1, output
    assert f"ds-pretrain: error: {key}: another program has written this value" in output.replace(
        f"{socket.gethostname()}: ", "")
    assert len(output.splitlines()) == 1
    assert not executed.exists()


def test_launchers_without_ssh_sign_exit_codes_with_a_secret_of_the_run_folder(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both launchers are threads of this process. Without a network, this host cannot pass for two hosts."""
    both_have_read = Barrier(2)  # the threads share os.environ
    monkeypatch.setattr("pretrain.cluster.hosts.rendezvous.check_equal", lambda *_: both_have_read.wait(LIMIT_S))
    monkeypatch.setenv(SECRET_VARIABLE, "")
    port, ranks = free_port(), {"a": 1, "b": 1}
    request = PreflightRequest(run=tmp_path / "run", files=(), folder=tmp_path)
    modes = []

    def start(index: int) -> Rendezvous:
        rendezvous = join_rendezvous(tuple(ranks), index, "127.0.0.1", port, LIMIT_S)
        if index == 1:
            wait_until(lambda: any((tmp_path / "run").glob(".cluster-*")))
            modes.extend(path.stat().st_mode & 0o777 for path in (tmp_path / "run").iterdir())
        rendezvous.check_hosts(ranks, request)
        return rendezvous

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(start, (0, 1))
    assert modes == [0o600]
    assert re.fullmatch("[0-9a-f]{64}", os.environ[SECRET_VARIABLE])
    second.leave(0, 0)
    assert first.store.read("code: rank 1", int) == 0
    monkeypatch.setenv(SECRET_VARIABLE, "")
    with pytest.raises(ForeignValueError, match="not signed"):
        first.store.read("code: rank 1", int)


def test_only_signed_values_of_the_expected_form_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = RankResult[dict[str, ConnectionResult]]
    value = RankResult({"h1": ConnectionResult(1e-4, -0.5)})
    monkeypatch.setenv(SECRET_VARIABLE, "of an earlier start")
    old = encode_value("disk: rank 1", value)
    monkeypatch.setenv(SECRET_VARIABLE, "of this start")
    good = encode_value("disk: rank 1", value)
    assert decode_value("disk: rank 1", good, kind) == value
    for content in (b"", b"x", old, good[:-1], good[32:], pickle.dumps(value), good + b" ", bytes(40)):
        with pytest.raises(ForeignValueError, match=r"^disk: rank 1: .* not signed with this rank's DS_PRETRAIN_SECRE"):
            decode_value("disk: rank 1", content, kind)
    with pytest.raises(ForeignValueError, match="not signed"):
        decode_value("disk: rank 2", good, kind)  # a copy of another rank's value
    with pytest.raises(ForeignValueError, match=r"it has 16,777,\d+ bytes"):
        decode_value("disk: rank 1", encode_value("disk: rank 1", "x" * 2**24), str)
    for wrong in ([], "x", {"value": 1}, {"value": {"h1": {"error": 5}}}, {"value": None, "error": {}}, None):
        with pytest.raises(ForeignValueError, match="not of the expected form"):
            decode_value("disk: rank 1", encode_value("disk: rank 1", wrong), kind)
    for text in (b"[" * 100_000, b'{"value":' * 100_000, b"9" * 100_000, b"\xff", b"NaN"):
        with pytest.raises(ForeignValueError, match="not of the expected form"):
            decode_value("k", _signature("k", text) + text, kind)


def test_a_port_in_use_is_rejected_with_a_remedy(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, PROGRAM, "check-cluster", *SMALL, "--save", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120,
                              env={**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "MASTER_PORT": port})
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith(f"ds-pretrain: error: MASTER_PORT: another program listens on port {port} of")
    assert "Unset MASTER_PORT" in done.stderr
    assert len(done.stderr.splitlines()) == 1
