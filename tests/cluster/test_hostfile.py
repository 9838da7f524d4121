"""Hostfile, host filters, command lines and the environment of the ranks. These tests need no other host."""

import subprocess
from pathlib import Path

import pytest

from pretrain.cluster.hosts.hostfile import choose_hosts, read_hostfile
from pretrain.cluster.hosts.multihost_job import combine_exit_codes
from pretrain.cluster.hosts.preflight import HostFacts
from pretrain.cluster.hosts.rank_environment import (
    interface_variables,
    quote_variables,
    rank_variables,
    threads_per_rank,
    user_variables,
    write_environment,
)
from pretrain.cluster.launcher_flags import launcher_parser
from pretrain.cluster.multihost_launch import deepspeed_command, main, quote_for_pdsh
from pretrain.errors import ConfigError
from tests.support.rejection import rejection


def _facts(*, interface: str = "eth0", cores: int = 8, gpus: int = 0) -> HostFacts:
    return HostFacts(python="3", packages={}, has_folder=True, code_version="1", code_digest="c", commit="c",
                     files={}, run_problem="", interface=[interface, "10.0.0.1"], cores=cores, gpus=gpus)


def test_hosts_are_in_the_order_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# two machines\n\nnode-b  slots=4\n10.0.0.7\tslots=2  # the old one\n")
    assert list(read_hostfile(str(path)).items()) == [("node-b", 4), ("10.0.0.7", 2)]


@pytest.mark.parametrize(("text", "words"), [
    ("a slots=2\na slots=1\n", [":2", "host a", "already on line 1"]),
    ("a\n", [":1", "'a'", "NAME slots=N", "`a slots=1`"]),
    ("a slots = 2\n", [":1", "'a slots = 2'", "without spaces around ="]),
    ("a slots=two\n", [":1", "'a slots=two'"]),
    ("a slots=2 max-slots=4\n", [":1", "max-slots"]),
    ("a slots=1\nb slots=0\n", [":2", "slots=0", "at least 1"]),
    ("me@a slots=1\n", [":1", "'me@a'", ".ssh/config"]),
    ("a;reboot slots=1\n", [":1", "'a;reboot'"]),
    ("# nobody\n", ["no hosts"]),
    ("\0\xff slots=1", [":1", "expected a host name"]),
    ("a b slots=2\n", ["Write a line `NAME slots=N` for each host"]),
    ("node[1-4] slots=8\n", ["expected a host name", "Write a line `NAME slots=N` for each host"]),
    *((line, ["Begin the line with the name of a host, or with # to leave it out"])
      for line in ("[servers]", "slots=8", "fe80::1", "fe80::1 slots=8", '{"a": 8}')),
])
def test_bad_hostfiles_are_rejected(text: str, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    error = rejection(main, ["--hostfile", str(path), "--", "--model", "tiny"])
    assert all(word in error for word in [str(path), *words]), error


@pytest.mark.parametrize(("line", "right"), [
    *((line, "a slots=8") for line in (
        "a slots=8 max_slots=8", "a max-slots=9 slots=8", "a lots=8", "a cpu=8", "a:8", "a 8", "a slots: 8",
        "a slots 8", "a SLOTS=8", "a, slots=8", "a slots=8,", "a slots = 8", "a:slots=8", "me@a:8", "me@a slots=8")),
    *((line, "a slots=1") for line in ("a", "a # b", "a slots=-1", "a slots=two", "a slots=", "a:0", "a:1:2",
                                       "a slots=0 max_slots=8", "a ansible_host=10.0.0.1", "a slots=+8", "me@a"))])
def test_a_wrong_line_of_a_hostfile_names_a_right_one(line: str, right: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(line)
    with pytest.raises(ConfigError) as error:
        read_hostfile(str(path))
    message = str(error.value)
    assert f". Write `{right}`" in message
    assert ("without spaces around =" in message) == (" = " in line)
    path.write_text(right)
    assert read_hostfile(str(path)) == {"a": int(right[-1])}


def test_missing_hostfile_and_wrong_flags_are_rejected(tmp_path: Path) -> None:
    for words, message in ((["--hostfile", str(tmp_path / "none"), "--"], "No such file"),
                         (["--hostfile", "x"], "No such file"), (["--hostfle", "x", "--"], "Did you mean"),
                         (["--"], "--hostfile is missing")):
        with pytest.raises(ConfigError, match=message):
            main(words)


def test_filters_choose_the_same_hosts_as_deepspeed() -> None:
    from deepspeed.launcher.runner import apply_num_nodes_and_gpus, parse_inclusion_exclusion

    hosts = {"a": 4, "b": 4, "c": 2}
    for include, exclude, nodes, slots in (("", "", -1, -1), ("b@a:2,0", "", -1, -1), ("", "a:1@c", -1, -1),
                                           ("", "c:0,1", -1, -1), ("", "", 2, 3), ("", "", -1, 1)):
        deepspeeds = apply_num_nodes_and_gpus(parse_inclusion_exclusion(hosts, include, exclude), nodes, slots)
        ours = choose_hosts(hosts, include=include, exclude=exclude, num_nodes=nodes, num_slots=slots)
        assert list(ours.items()) == list(deepspeeds.items())


@pytest.mark.parametrize(("filters", "words"), [
    ({"include": "a", "exclude": "b"}, ["--include, --exclude", "cannot be combined"]),
    ({"include": "node-x"}, ["--include", "'node-x'", 'Did you mean "node-a"?']),
    ({"exclude": "node-a:0-1"}, ["--exclude", "'0-1'", "no ranges"]),
    ({"include": "node-a:2"}, ["slot '2'", "from 0 to 1"]),
    ({"exclude": "node-a@b"}, ["every slot is excluded"]),
    ({"num_nodes": 3}, ["--num_nodes", "at most 2"]),
    ({"num_slots": 2}, ["--num_gpus", "at most 1, the slots of b"]),
])
def test_bad_filters_are_rejected(filters: dict[str, str | int], words: list[str]) -> None:
    error = rejection(choose_hosts, {"node-a": 2, "b": 1}, **filters)
    assert all(word in error for word in words), error


def test_environment_of_the_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shell = {"NCCL_DEBUG": "INFO", "HF_HOME": "/data/hf", "HF_TOKEN": "secret", "HOME": "/root", "DS_ENV_FILE": "x",
             "TORCH_LOGS": 'a"b', "OMP_NUM_THREADS": "3"}
    (tmp_path / ".deepspeed_env").write_text("\n# mine\nNCCL_DEBUG=WARN\nexport MY_FLAG=a b\n\n")
    user = user_variables(shell, [tmp_path, tmp_path / "none"])
    assert user == {"NCCL_DEBUG": "WARN", "HF_HOME": "/data/hf", "TORCH_LOGS": 'a"b', "OMP_NUM_THREADS": "3",
                    "MY_FLAG": "a b"}
    assert "TORCH_LOGS" not in user_variables(shell, [tmp_path], "slurm")
    assert "the ranks do not get TORCH_LOGS: --launcher slurm" in capsys.readouterr().err
    facts, ranks = {"a": _facts(cores=8), "b": _facts(cores=4)}, {"a": 2, "b": 2}
    assert threads_per_rank(facts, ranks) == 2
    variables = rank_variables(facts, ranks, user, job="j")
    path = write_environment(tmp_path / "run", variables)
    assert path.read_text().splitlines() == [
        "OMP_NUM_THREADS=3", "NCCL_SOCKET_IFNAME=eth0", "GLOO_SOCKET_IFNAME=eth0", "NCCL_DEBUG=WARN",
        "HF_HOME=/data/hf", 'TORCH_LOGS=a"b', "MY_FLAG=a b", "DS_PRETRAIN_JOB=j"]
    assert path.stat().st_mode & 0o077 == 0
    different = {"a": _facts(interface="eth0"), "b": _facts(interface="ens3")}
    # no variable for gloo: each rank chooses its own interface
    assert interface_variables(different) == {"NCCL_SOCKET_IFNAME": "eth0,ens3"}
    (tmp_path / ".deepspeed_env").write_text("not a variable\n")
    with pytest.raises(ConfigError, match=r"deepspeed_env:1: found 'not a variable'"):
        user_variables({}, [tmp_path])


def test_quoted_words_are_unchanged_by_deepspeed_pdsh_and_the_shell(tmp_path: Path) -> None:
    from deepspeed.launcher.multinode_runner import PDSHRunner
    from deepspeed.launcher.runner import parse_args

    words = ["--a", "two words", 'quote " and $HOME `x` \\', "$HOME;ls", "it's", "100%n", "x=%h,y", "(a|b)*", "a b %n"]
    args = parse_args(["train.py", *map(quote_for_pdsh, words)])
    line = " ".join(PDSHRunner(args, "").user_arguments).replace("%%", "%")  # pdsh replaces %% by %
    shown = subprocess.run(["bash", "-c", f"printf '%s\\n' {line}"], capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines() == words


@pytest.mark.parametrize("value", ["plain", "two words", "$(touch x)", "`touch x`", 'a"; touch x; "', "it's",
                                   "100%h %%", "back\\slash \\$HOME \\", "a;b&c|d>e*f?g#h~!i", "-x", "a=b", "",
                                   "\u00e4\u4e2d"])
def test_variables_are_unchanged_by_deepspeed_pdsh_and_the_shell(value: str, tmp_path: Path) -> None:
    from deepspeed.launcher.multinode_runner import PDSHRunner
    from deepspeed.launcher.runner import parse_args

    shell = {"UCX_NOTE": value, "PYTHONPATH": f"/lib {value}", "OTHER": value}
    found = quote_variables("pdsh", {"MY_FLAG": value}, shell)
    runner = PDSHRunner(parse_args(["train.py"]), "")
    for name, each in {**shell, **found}.items():  # first what DeepSpeed exports by itself, then its file
        if name != "OTHER":
            runner.add_export(name, each)
    runner.exports = {name: each.replace("%%", "%") for name, each in runner.exports.items()}  # as pdsh does
    line = "".join(f"export {name}={each}; " for name, each in runner.exports.items())
    line += "printf '%s\\0' \"$MY_FLAG\" \"$UCX_NOTE\" \"$PYTHONPATH\""
    shown = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert shown.stdout.split("\0")[:-1] == [value, value, f"/lib {value}".strip()]
    assert list(tmp_path.iterdir()) == []
    if value not in ("plain", "-x", "a=b", "", "\u00e4\u4e2d"):
        with pytest.raises(ConfigError, match=r"^MY_FLAG: --launcher openmpi would change the value"):
            quote_variables("openmpi", {"MY_FLAG": value}, {})


@pytest.mark.parametrize("name", ["two words", "$(touch x)", "`touch x`", "a;b", "it's", 'a"b', "a%hb", "a&b", "a|b",
                                  "a>b", "a*", "a\\b", "a#b", "a\nb", "(a)", "a!", "{a,b}", "a?"])
def test_folders_that_a_shell_would_split_or_execute_are_rejected(
        name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pretrain.cluster.multihost_launch.shutil.which", lambda program: f"/usr/bin/{program}")
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    folder = tmp_path / name
    folder.mkdir()
    start = ["--hostfile", str(tmp_path / "hosts")]
    with pytest.raises(ConfigError, match=r"^--venv_script: DeepSpeed passes .* without quotes"):
        main([*start, "--venv_script", str(folder / "activate"), "--", "--save", "r"])
    monkeypatch.chdir(folder)
    for launcher in ("pdsh", "openmpi", "slurm"):
        with pytest.raises(ConfigError, match=r"^working folder: DeepSpeed passes .* without quotes"):
            main([*start, "--launcher", launcher, "--", "--save", "r"])
    assert list(folder.iterdir()) == []


def test_deepspeed_command_for_each_launcher() -> None:
    def command(*words: str) -> str:
        flags = launcher_parser("").parse_args(["--hostfile", "hosts", *words])
        return " ".join(deepspeed_command(flags, ["train.py", "--save", "r"], hostfile=Path("/hosts"),
                                          master_addr="10.0.0.1", interface="ib0"))

    assert "--include b:0 " in command("--include", "b:0")
    assert "--launcher_args=--mca btl_tcp_if_include ib0" in command("--launcher", "openmpi")
    assert "ib0" not in command("--launcher", "openmpi", "--launcher_args=--mca btl_tcp_if_include eth1")
    assert "--launcher_args=--kill-on-bad-exit=1" in command("--launcher", "slurm")
    assert command().endswith("train.py --save r")


def test_exit_codes_of_hosts_are_combined() -> None:
    assert combine_exit_codes([0, 0]) == 0
    assert combine_exit_codes([75, 75]) == 75
    assert combine_exit_codes([75, 247]) == 247  # not all hosts have saved
    assert combine_exit_codes([247, 77]) == 77
    assert combine_exit_codes([1, 2]) == 2
