"""`ds-pretrain check-cluster` on the hosts of a hostfile."""

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.cluster.test_multihost_launch import rejection
from tests.cluster.workers.ssh_hosts import Hosts
from tests.extensions.health.test_check_cluster import SMALL
from tests.support.launch import LIMIT_S, free_port


def test_subcommands_run_on_the_hosts_of_a_hostfile(hosts: Hosts, corpus: str, tmp_path: Path) -> None:
    """Without a run there is no run folder to compare; files that the words name are compared."""
    command = [sys.executable, "-m", "pretrain", "--hostfile", str(hosts.hostfile(tmp_path / "hosts")), "--master_port",
               str(free_port()), "check-cluster"]
    done = subprocess.run([*command, *SMALL, "--min_ratio", "0.001", "--json"], env=hosts.environ, cwd=tmp_path,
                          capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [re.sub(r"^\S+: ", "", line) for line in done.stdout.splitlines()]  # pdsh begins each line with the host
    report = json.loads("\n".join(lines[lines.index("{"):lines.index("}") + 1]))
    assert (report["ranks"], len(report["hosts"])) == (2, 2)
    assert not [path for path in tmp_path.iterdir() if path.name != "hosts"]
    (tmp_path / "run.yaml").write_text(f"train_data: {corpus}\n")
    empty = tmp_path / "empty"
    empty.mkdir()
    with hosts.b.bind(empty, Path(corpus).parent):
        line = rejection(hosts, [*command, "--config=run.yaml"], tmp_path)
    assert f"{hosts.b.address}: no {corpus}.bin; {hosts.b.address}: no {corpus}.idx" in line
    line = rejection(hosts, [*command[:-1], "--check_only", "evaluate"], tmp_path)
    assert "--check_only: it is for runs, not for evaluate" in line
