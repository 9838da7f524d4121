"""`ds-pretrain`: command line, validation before torch is imported, one run, and signals."""

import base64
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pretrain.__main__ import main as ds_pretrain
from pretrain.cluster.ds_pretrain import local_slots, main
from pretrain.cluster.launcher_flags import find_rank_command, launcher_parser, split_command_line
from pretrain.commands import COMMANDS
from pretrain.config.flags.arguments import FLAGS
from pretrain.distributed.device import Device
from pretrain.distributed.tcp_store import SECRET_VARIABLE
from pretrain.errors import ConfigError
from pretrain.monitor.environment import environment_variables
from tests.support.hf_models import save_hf_model
from tests.support.launch import ROOT
from tests.support.rejection import rejection
from tests.test_train import _environment, _flags, losses

ZERO2 = ROOT / "ds_configs" / "zero2_bf16.json"
GPU = Device("cuda", fp16=True, bf16=True, memory_bytes=0)
CPU = Device("cpu", fp16=False, bf16=True, memory_bytes=0)


@pytest.mark.parametrize("words", [
    ["--num_gpus", "2", "--config", "run.yaml", "--train_steps=5"],
    ["--config", "run.yaml", "--num-gpus=2", "--train_steps=5"],
    ["--num_accelerators", "2", "pretrain/train.py", "--config", "run.yaml", "--train_steps=5"],
    ["--num_gpus", "2", "--", "--config", "run.yaml", "--train_steps=5"],
    ["--num_gpus", "2", "--", "pretrain/train.py", "--config", "run.yaml", "--train_steps=5"],
])
def test_flags_of_the_launcher_and_of_the_run_are_separated(words: list[str]) -> None:
    launcher, train = split_command_line(words)
    assert launcher_parser("").parse_args(launcher).num_gpus == 2
    assert train == ["--config", "run.yaml", "--train_steps=5"]


def test_launcher_and_train_py_have_no_flag_in_common() -> None:
    parser = launcher_parser("")
    assert [name for name in FLAGS if parser.takes_value(f"--{name}") is not None] == []


@pytest.mark.parametrize("words", [
    ["--num_gpus", "2", "evaluate", "--config", "run.yaml"], ["evaluate", "--config", "run.yaml", "--num_gpus", "2"],
    ["--num_gpus=2", "tools/evaluate.py", "--config", "run.yaml"],
])
def test_a_subcommand_on_several_ranks_is_found_in_any_place(words: list[str],
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr("pretrain.cluster.ds_pretrain.run_launcher", lambda *args: started.append(args[0]) or 0)
    monkeypatch.setattr("sys.argv", ["ds-pretrain", *words])
    assert ds_pretrain() == 0
    assert started[0][-3:] == ["evaluate", "--config", "run.yaml"]
    assert json.loads(base64.urlsafe_b64decode(next(word for word in started[0] if word.startswith("--world_info=")
                                                    ).partition("=")[2]))["localhost"] == [0, 1]


@pytest.mark.parametrize(("words", "line"), [
    (["chek"], "there is no subcommand 'chek'. Did you mean \"check\"?"),
    (["eval", "runs/x"], "there is no subcommand 'eval'. ds-pretrain evaluate: "),
    (["resume"], "The command that started the run resumes it"), (["run.yaml"], "--config run.yaml"),
    (["check", "run.yaml"], "--config run.yaml"),
    (["config", "zero3_bf1"], "there is no layout 'zero3_bf1'. Did you mean \"zero3_bf16\"?"),
    (["template", "slrum"], "there is no template 'slrum'. Did you mean \"slurm\"?"),
    (["train", "--train_stps", "3"], "--train_stps: there is no such flag. Did you mean \"--train_steps\"?"),
])
def test_misspelt_names_are_rejected(words: list[str], line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["ds-pretrain", *words])
    with pytest.raises(ConfigError, match=re.escape(line)):
        ds_pretrain()


def test_every_subcommand_has_a_help_page_and_a_script_in_tools_shows_the_same_one() -> None:
    scripts = {path: re.search(r'program\("(.*)"\)', path.read_text()) for path in (ROOT / "tools").glob("*.py")}
    tools = {found[1]: path for path, found in scripts.items() if found}
    for name in COMMANDS:
        starts = [["-m", "pretrain", name], *([[str(tools[name])]] if name in tools else [])]
        pages = {subprocess.run([sys.executable, *start, "--help"], text=True, capture_output=True, check=True,
                                env={**os.environ, "COLUMNS": "80"}).stdout for start in starts}
        assert len(pages) == 1
        assert f"ds-pretrain {name}" in pages.pop()
    assert tools.keys() <= COMMANDS.keys()


def test_tools_start_on_a_free_port(corpus: str, tmp_path: Path) -> None:
    """The default port of `deepspeed` is taken, by this test or by another program."""
    save_hf_model(tmp_path / "model", {
        "model_type": "llama", "vocab_size": 260, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
        "intermediate_size": 48, "max_position_embeddings": 64})
    environ = {**_environment(), "PYTHONPATH": str(ROOT)}
    del environ["MASTER_PORT"]

    def start(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pretrain", "--num_gpus", "2"]
        return subprocess.run([*command, *words], env=environ, cwd=tmp_path, capture_output=True, text=True,
                              timeout=900)

    with socket.socket() as taken:
        with contextlib.suppress(OSError):
            taken.bind(("", 29500))
            taken.listen()
        done = start(str(ROOT / "tools" / "evaluate.py"), "model", "--data", corpus, "--max_samples", "4",
                     "--dtype", "fp32")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cpu, fp32, 2 ranks" in done.stdout
    rejected = start("evaluate", "nowhere")
    assert rejected.returncode == 2, rejected.stderr
    assert rejected.stderr.count("ds-pretrain: error: ") == 1
    assert "Traceback" not in rejected.stderr


@pytest.mark.parametrize("given", ["", "of the user"])
def test_ranks_get_a_secret_that_no_command_line_shows(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, given)
    started = []
    monkeypatch.setattr("pretrain.cluster.ds_pretrain.run_launcher", lambda *args: started.append(args) or 0)
    assert main(["--num_gpus", "1", str(ROOT / "tools" / "evaluate.py")]) == 0
    (command, environ, _), = started
    secret = environ[SECRET_VARIABLE]
    assert secret == given or re.fullmatch("[0-9a-f]{64}", secret)
    assert secret not in " ".join(command)
    assert SECRET_VARIABLE not in environment_variables(environ)  # what run.json records


@pytest.mark.parametrize(("words", "message"), [
    (["--check_only", "evaluate"], "--check_only: it is for runs, not for evaluate"),
    ([], "the flags of the run are missing"),
    (["--num_gpus", "0"], "--num_gpus: found '0'"),
    (["--num_gpus", "x"], "--num_gpus: found 'x'"),
    (["--num_gpus", "1000000000"], "--num_gpus: found '1000000000'"),
    (["--master_port", "99999"], "--master_port: found '99999'"),
    (["--grace", "nan"], "--grace: found 'nan'"),
    (["--num_nodes", "2"], "--num_nodes: 2 hosts need a --hostfile"),
    (["--master_addr", "10.0.0.1"], "--master_addr: this flag is for several hosts, but there is no --hostfile"),
    (["--hostfile", "none"], "--hostfile none: the hostfile cannot be read: No such file"),
    (["--include", "node-b"], "--include: found 'node-b'"),
    (["--num_gpuz", "2"], "--num_gpuz: there is no such flag"),
    (["--seq_length", "0"], "--seq_length: found 0"),
    (["--num_gpus", "3", "--global_batch_size", "4"], "train_batch_size: found 4 != 2 x 2 x 3"),
])
def test_bad_input_is_rejected(words: list[str], message: str, corpus: str, tmp_path: Path,
                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    flags = _flags(corpus, tmp_path / "run", "--train_steps", "2", config=ZERO2) if words else []
    assert message in rejection(main, [*flags, *words] if find_rank_command(words) is None else words)
    assert not (tmp_path / "run").exists()


def test_a_port_in_use_and_another_launcher_are_rejected(corpus: str, tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch,
                                                         capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    flags = _flags(corpus, tmp_path / "run", "--train_steps", "2", config=ZERO2)
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with pytest.raises(ConfigError, match=f"--master_port: another program listens on port {port}"):
            main(["--master_port", port, *flags])
        monkeypatch.setenv("MASTER_PORT", port)
        with pytest.raises(ConfigError, match="Remove MASTER_PORT"):
            main(flags)
    monkeypatch.delenv("MASTER_PORT")
    assert main(["--check_only", *flags, "--gradient_accumulation_steps", "1"]) == 0
    printed = "".join(capfd.readouterr())
    assert "the run is valid on " in printed
    assert re.search(r"^ds-pretrain: memory: predicted [\d.]+ MiB at the peak \(parameters ", printed, re.MULTILINE)
    for name in ("RANK", "WORLD_SIZE"):  # RANK and WORLD_SIZE take precedence over SLURM's variables
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    with pytest.raises(ConfigError, match="another launcher started this process as rank 1 of 2"):
        main(flags)


def test_devices_of_the_ranks_on_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def slots(device: Device, *words: str) -> list[int | str]:
        return local_slots(launcher_parser("").parse_args(words), device)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("pretrain.cluster.ds_pretrain._num_gpus", lambda: 4)
    assert slots(GPU) == [0, 1, 2, 3]
    assert slots(GPU, "--num_gpus", "2") == [0, 1]
    assert slots(GPU, "--include", "localhost:1,3") == [1, 3]
    assert slots(GPU, "--exclude", "localhost:0") == [1, 2, 3]
    assert slots(CPU, "--num_gpus", "5") == [0, 1, 2, 3, 4]
    with pytest.raises(ConfigError, match="--num_gpus: found 5; expected at most 4"):
        slots(GPU, "--num_gpus", "5")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-abc")
    assert slots(GPU) == [2, "GPU-abc"]
    assert slots(GPU, "--num_gpus", "1") == [2]
    with pytest.raises(ConfigError, match="at most 2, the GPUs of this host in CUDA_VISIBLE_DEVICES"):
        slots(GPU, "--num_gpus", "3")


def test_a_bad_run_is_rejected_before_torch_is_imported(corpus: str, tmp_path: Path) -> None:
    code = "import sys\nfrom pretrain.errors import ConfigError\nfrom pretrain.cluster.ds_pretrain import main\n" \
           "try:\n    main(sys.argv[1:])\nexcept ConfigError as error:\n    print(error)\n" \
           "print([name for name in ('torch', 'deepspeed', 'transformers') if name in sys.modules])"
    flags = _flags(str(tmp_path / "nowhere"), tmp_path / "run", "--train_steps", "2", config=ZERO2)
    done = subprocess.run([sys.executable, "-c", code, "--num_gpus", "2", *flags], capture_output=True, text=True,
                          env={**_environment(), "PYTHONPATH": str(ROOT)}, timeout=120)
    error, imported = done.stdout.splitlines()
    assert "nowhere.idx: there is no such file" in error
    assert imported == "[]"


def test_two_ranks_train_and_print_no_warnings(corpus: str, tmp_path: Path) -> None:
    flags = _flags(corpus, Path("run"), "--train_steps", "2", config=ZERO2)
    done = subprocess.run([sys.executable, "-m", "pretrain", "--num_gpus", "2", *flags],
                          env={**_environment(), "PYTHONPATH": str(ROOT)}, cwd=tmp_path, text=True, timeout=300,
                          capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 data-parallel" in done.stdout
    assert len(losses(tmp_path / "run")) == 2
    lines = done.stderr.splitlines()
    assert lines[0].startswith("ds-pretrain: 2 ranks on this host, port ")
    assert lines[1:] == ["loading torch and DeepSpeed", "connecting 2 ranks", "building the engine"]


# ---- signals: the tests start a small program instead of DeepSpeed's launcher

_STARTER = "import os, pathlib, sys\nfrom pretrain.cluster import ds_pretrain\n" \
           "ds_pretrain._SIGTERM_GRACE_S = 1.0\nsys.exit(ds_pretrain.run_launcher(" \
           "[sys.executable, '-u', '-c', *sys.argv[1:]], dict(os.environ), pathlib.Path('run')))"
_SAVES = "import signal, sys\nfor number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):\n" \
         "    signal.signal(number, lambda *_: sys.exit(75))\nprint('ready')\nsignal.pause()"
_SAVES_SLOWLY = "import signal\nfor number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):\n" \
                "    signal.signal(number, lambda *_: print('saving'))\nprint('ready')\nwhile True: signal.pause()"
_HAS_NO_HANDLER = "import signal\nprint('ready')\nsignal.pause()"
_WATCHES = "import sys, time\nfrom pathlib import Path\nfrom pretrain.distributed.world import World\n" \
           "from pretrain.resilience.launcher_watch import LauncherWatch\n" \
           "watch = LauncherWatch(World(0, 1, 0, 1, 'torch'))\nwatch.enable_save()\nprint('ready')\n" \
           "while not watch.lost: time.sleep(0.1)\nPath(sys.argv[1]).write_text(watch.lost)"


@pytest.fixture
def start_program() -> "Callable[..., subprocess.Popen[str]]":
    def start(*words: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen([sys.executable, "-c", _STARTER, *words], stdout=subprocess.PIPE, text=True,
                                   env={**os.environ, "PYTHONPATH": str(ROOT)})
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    return start


@pytest.mark.parametrize(("program", "number", "code"), [
    (_SAVES, signal.SIGTERM, 75), (_SAVES, signal.SIGINT, 75), (_SAVES, signal.SIGUSR1, 75),
    (_HAS_NO_HANDLER, signal.SIGINT, 130), (_HAS_NO_HANDLER, signal.SIGTERM, 143),
])
def test_ranks_save_on_a_signal_or_end_if_they_have_no_handler(
        program: str, number: signal.Signals, code: int, start_program: "Callable[..., subprocess.Popen[str]]") -> None:
    process = start_program(program)
    process.send_signal(number)
    assert process.wait(60) == code


@pytest.mark.parametrize("program", [["-m", "pretrain"], [str(ROOT / "pretrain" / "train.py")]])
def test_too_few_open_files_are_rejected_in_one_line(program: list[str], corpus: str, tmp_path: Path) -> None:
    words = [sys.executable, *program, *_flags(corpus, tmp_path / "run", "--train_steps", "5", config=ZERO2)]
    done = subprocess.run(["bash", "-c", 'ulimit -n 24; exec "$@"', "bash", *words], capture_output=True, text=True,
                          env={**_environment(), "PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr == "ds-pretrain: error: ulimit -n: found 24 open files per process; expected at least 256. " \
                          "Run `ulimit -n 4096` before the launcher's command.\n"


# A launcher that, like DeepSpeed's, waits until the child process of a rank that has died has ended too.
WAITING_LAUNCHER = f"""import os, subprocess, sys, time
begin = "import subprocess; print(subprocess.Popen(['sleep', '3600'], stdout=subprocess.DEVNULL).pid)"
orphan = int(subprocess.run([sys.executable, '-c', begin], stdout=subprocess.PIPE, text=True).stdout)
os.kill(orphan, {int(signal.SIGTERM)})
deadline = time.monotonic() + 60
while os.path.exists(f'/proc/{{orphan}}') and time.monotonic() < deadline:
    time.sleep(0.1)
sys.exit(9 if os.path.exists(f'/proc/{{orphan}}') else 2)"""


def test_orphans_that_have_ended_do_not_delay_the_launcher() -> None:
    done = subprocess.run([sys.executable, "-c", _STARTER, WAITING_LAUNCHER], timeout=100,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 2


def test_a_killed_rank_is_reported() -> None:
    done = subprocess.run([sys.executable, "-c", _STARTER, "import sys\nsys.exit(-9)"], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60)
    assert (done.returncode, done.stderr) == (247, "ds-pretrain: SIGKILL ended a rank\n")


def test_a_second_signal_changes_nothing_and_the_third_ends_at_once(
        start_program: "Callable[..., subprocess.Popen[str]]") -> None:
    process = start_program(_SAVES_SLOWLY)
    assert process.stdout is not None
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "saving\n"
    process.send_signal(signal.SIGTERM)  # a copy
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert process.stdout.read() == "saving\n"  # SIGTERM of the end; end of file: the program has ended


def test_ranks_notice_that_ds_pretrain_was_killed(
        tmp_path: Path, start_program: "Callable[..., subprocess.Popen[str]]") -> None:
    process = start_program(_WATCHES, str(tmp_path / "lost"))
    process.kill()
    assert process.stdout is not None
    assert process.stdout.read() == ""  # end of file: the program has ended
    assert (tmp_path / "lost").read_text() == "ds-pretrain"
