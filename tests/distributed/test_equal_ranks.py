"""Ranks with different settings, files, packages or variables: every rank ends, and one line names the difference."""

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from pretrain.config import equal_facts
from pretrain.config.equal_facts import OWN_FLAGS, VARIABLES, common_facts, flag_facts, run_facts
from pretrain.config.flags.arguments import DEFAULTS, FLAGS, TYPES, RunArguments, arguments_of
from pretrain.config.validate import check_run
from pretrain.distributed import equal_ranks
from pretrain.distributed.device import cpu_device
from pretrain.distributed.equal_ranks import Facts, MissingRanksError, check_equal_ranks
from pretrain.distributed.key_value_store import RankStore, key_of
from pretrain.distributed.process import free_port
from pretrain.distributed.world import World
from pretrain.errors import REJECTED, ConfigError
from pretrain.model.config import load_model_config
from tests.support.cases import config, flags
from tests.support.launch import LIMIT_S, ROOT

TWO = World(rank=0, size=2, local_rank=0, local_size=2, launcher="torch")


# ---- which facts are compared

def other_value(name: str) -> Any:
    """Return a value of the flag that differs from the default."""
    default, flag = DEFAULTS[name], FLAGS[name]
    kind = str(TYPES[name])
    if flag.choices:
        return next(choice for choice in flag.choices if choice != default)
    if isinstance(default, bool):
        return not default
    if isinstance(default, (int, float)):
        return default + 1
    return ["other"] if "list" in kind else 3 if "int" in kind else 0.25 if "float" in kind else "other"


@pytest.mark.parametrize("name", FLAGS)
def test_every_flag_is_compared_or_belongs_to_one_rank(name: str) -> None:
    plain, other = (flag_facts(args) for args in (RunArguments(), arguments_of({name: other_value(name)})))
    differing = [key for key in {*plain, *other} if plain.get(key) != other.get(key)]
    of_one = name in OWN_FLAGS or FLAGS[name].of_host or FLAGS[name].group.not_recorded != ""
    assert differing == ([] if of_one else [f"--{name}"])


def test_paths_may_differ_but_not_what_lies_there(corpus: str, tmp_path: Path) -> None:
    def facts(folder: str, *, values: dict[str, Any] | None = None, data: str = corpus, **own: Any) -> dict[str, str]:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "ds.json").write_text(json.dumps(values or config(2)))
        (tmp_path / folder / "config.json").write_text(json.dumps(
            {**load_model_config("tiny", None).hf_config, "vocab_size": 512, **own.pop("model", {})}))
        for suffix in (".bin", ".idx"):
            (tmp_path / folder / f"corpus{suffix}").write_bytes(Path(f"{data}{suffix}").read_bytes())
        args = RunArguments(deepspeed_config=str(tmp_path / folder / "ds.json"), seq_length=64, train_steps=9,
                            model=str(tmp_path / folder / "config.json"), split="80,20,0", tokenizer="bytes",
                            train_data=[str(tmp_path / folder / "corpus")], save=str(tmp_path / folder), **own)
        return run_facts(check_run(args, world_size=2, device=cpu_device()), "ds-pretrain train", TWO)

    plain = facts("a")
    assert facts("b") == plain
    changed = {**config(2), "gradient_clipping": 0.5}
    short = tmp_path / "short"
    for suffix in (".bin", ".idx"):
        short.with_suffix(suffix).write_bytes(Path(f"{corpus}{suffix}").read_bytes())
    content = bytearray(short.with_suffix(".bin").read_bytes())
    content[:64] = content[64:128]
    short.with_suffix(".bin").write_bytes(bytes(content))
    for other, expected in ((facts("c", values=changed), "DeepSpeed JSON, gradient_clipping"),
                            (facts("d", model={"n_layer": 3}), "config.json of the model, n_layer"),
                            (facts("e", data=str(short)), "fingerprint of the train data")):
        assert next(name for name in plain if plain[name] != other.get(name)) == expected


def test_programs_packages_devices_and_variables_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = common_facts("ds-pretrain train", TWO, cpu_device(), {})
    for name in VARIABLES:
        assert common_facts("ds-pretrain train", TWO, cpu_device(), {name: "x"}) == {**plain, name: '"x"'}
    unchanged = {"OMP_NUM_THREADS": "3", "NCCL_SOCKET_IFNAME": "eth1", "HOME": "/root", "CUDA_VISIBLE_DEVICES": "1"}
    assert common_facts("ds-pretrain train", TWO, cpu_device(), unchanged) == plain
    cuda = dataclasses.replace(cpu_device(), kind="cuda")
    larger = dataclasses.replace(TWO, size=4)
    monkeypatch.setattr(equal_facts, "version", lambda package: "1.0")
    for other in (common_facts("ds-pretrain evaluate", TWO, cpu_device(), {}), common_facts(
            "ds-pretrain train", larger, cpu_device(), {}), common_facts("ds-pretrain train", TWO, cuda, {})):
        assert sum(plain[name] != other[name] for name in plain) == 1 + sum(
            plain[name] != '"1.0"' and other[name] == '"1.0"' for name in plain)


# ---- the comparison: threads are the ranks

def compare(facts: list[Facts | None], monkeypatch: pytest.MonkeyPatch, timeout_s: float = 30.0) -> list[str]:
    """Return the error of each rank; "": none. Ranks without facts never connect."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    lines, stores = [""] * len(facts), []

    def run(rank: int, own: Facts) -> None:
        world = World(rank=rank, size=len(facts), local_rank=rank, local_size=len(facts), launcher="torch")
        try:
            stores.append(check_equal_ranks(world, own, on_one_host=True, timeout_s=timeout_s))
        except MissingRanksError as error:
            lines[rank] = f"missing: {error}"
        except ConfigError as error:
            lines[rank] = str(error)

    ranks = [threading.Thread(target=run, args=(rank, own)) for rank, own in enumerate(facts) if own is not None]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    return lines


def test_the_first_difference_is_named_with_ranks_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = {"torch": "2.13", "--seed": "1", "--lr": "0.1"}
    assert compare([plain] * 5, monkeypatch) == [""] * 5
    other = {**plain, "--seed": "7", "--lr": "0.2"}
    lines = compare([plain, other, plain, other, plain], monkeypatch)
    assert len({*lines}) == 1, lines
    host = os.uname().nodename
    assert lines[0].startswith(f"--seed: the ranks must have the same value, and it is 1 on ranks 0, 2, 4 ({host}), "
                               f"and 7 on ranks 1, 3 ({host}); 1 more differ, such as --lr. Start all ranks with ")
    lines = compare([plain, {**plain, "MKL_CBWR": "AVX2"}, {**plain, "torch": "2.12"}], monkeypatch)
    assert {*lines} == {lines[0]}
    assert lines[0].startswith(f"torch: the ranks must have the same value, and it is 2.13 on ranks 0, 1 ({host}), and "
                               "2.12 on rank 2")
    different = compare([{"--seed": str(rank)} for rank in range(7)], monkeypatch)
    assert different == [different[0]] * 7


def test_missing_ranks_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(equal_ranks, "_REPORT_AFTER_S", 0.3)
    lines = compare([{}, None, {}, None], monkeypatch, timeout_s=1.0)
    assert [line.partition(",")[0] for line in lines] == ["missing: ranks 1", "", "missing: ranks 1", ""]
    assert "ranks 1, 3: not connected to rank 0 within " in lines[0]
    printed = capsys.readouterr().err
    assert "ds-pretrain: rank 0 waits for ranks 1, 3 of 4. If this is a shell in which no launcher starts them, " \
           "begin the command with `env -u RANK -u WORLD_SIZE`\n" in printed
    lines = compare([None, {}], monkeypatch, timeout_s=1.0)
    assert "missing: rank 0: no program listens at 127.0.0.1:" in lines[1]
    assert "rank 1 waits for rank 0" in capsys.readouterr().err


class CountingStore:
    """A store in this process that counts what one rank asks for."""

    def __init__(self) -> None:
        self.values, self.operations, self.received = dict[str, bytes](), 0, 0

    def set(self, key: str, value: bytes) -> None:
        self.operations += 1
        self.values[key] = value

    def wait(self, keys: list[str], timeout: object) -> None:
        self.operations += 1
        if not {*keys} <= self.values.keys():
            raise RuntimeError("some ranks have not posted")

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.operations += 1
        self.received += sum(len(self.values[key]) for key in keys)
        return [self.values[key] for key in keys]

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]


def test_each_rank_sends_one_digest_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: dict[int, list[tuple[int, int]]] = {}
    stores: list[Any] = []
    monkeypatch.setattr(equal_ranks, "_connect", lambda world, **_: RankStore(stores[-1], world.rank, world.size, 9.0))
    for size in (8, 1024):
        store: Any = CountingStore()
        stores.append(store)
        for rank in reversed(range(size)):  # rank 0 answers when all others have posted
            if rank > 0:
                digest = hashlib.sha256(json.dumps([("--seed", "1")]).encode()).hexdigest()
                RankStore(store, rank, size, 9.0).post(key_of(equal_ranks._DIGESTS, rank), digest)
        for rank in (0, 1, size - 1):
            store.operations = store.received = 0
            check_equal_ranks(dataclasses.replace(TWO, rank=rank, size=size), {"--seed": "1"}, on_one_host=True,
                              timeout_s=9.0)
            counted.setdefault(size, []).append((store.operations, store.received))
    assert counted[8][1:] == counted[1024][1:] == [counted[8][1]] * 2
    assert counted[1024][1][0] <= 3
    assert counted[1024][0][0] == counted[8][0][0] <= 5
    assert counted[1024][0][1] < 1024 * 200


# ---- real ranks

def start(folder: Path, ranks: list[list[str]], environs: list[dict[str, str]] | None = None,
          module: str = "pretrain.train", **own: str) -> list[tuple[int, str]]:
    """Start a program with the words and the variables of each rank. Returns exit code and stderr of each."""
    usual = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(len(ranks)),
             "LOCAL_WORLD_SIZE": str(len(ranks)), "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT), **own}
    processes = [subprocess.Popen([sys.executable, "-m", *module.split(), *words], cwd=folder, text=True,
                                  env={**usual, "RANK": str(rank), "LOCAL_RANK": str(rank),
                                       **(environs[rank] if environs else {})},
                                  stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
                 for rank, words in enumerate(ranks)]
    try:
        texts = [process.communicate(timeout=LIMIT_S)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, text) for process, text in zip(processes, texts, strict=True)]


def words_of(corpus: str, folder: Path, **changes: Any) -> list[str]:
    (folder / "ds.json").write_text(json.dumps(config(1)))
    words = {**flags(corpus, layers=1, steps=3, deepspeed_config=folder / "ds.json", save=folder / "run"), **changes}
    return [f"--{name}={value}" for name, value in words.items()]


def check_rejected(found: list[tuple[int, str]], line: str) -> None:
    assert [code for code, _ in found] == [REJECTED] * len(found), found
    printed = [text for _, output in found for text in output.splitlines() if "error:" in text]
    assert len(printed) >= 1, found
    assert all(line in text for text in printed), printed
    assert all("Traceback" not in output for _, output in found), found


DIFFERENT = {"--seed": "7", "--train_steps": "9", "--min_lr_ratio": "0.3", "--residual_dropout": "0.3",
             "--log_interval": "2", "--label_smoothing": "0.1"}


def test_two_ranks_with_another_seed_end_in_one_line(corpus: str, tmp_path: Path) -> None:
    plain = words_of(corpus, tmp_path)
    check_rejected(start(tmp_path, [plain, [*plain, "--seed=7"]]), "--seed: the ranks must have the same value")
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", DIFFERENT)
def test_two_ranks_with_other_flags(name: str, corpus: str, tmp_path: Path) -> None:
    plain = words_of(corpus, tmp_path)
    check_rejected(start(tmp_path, [plain, [*plain, f"{name}={DIFFERENT[name]}"]]), f"{name}: the ranks must")


@pytest.mark.slow
def test_two_ranks_with_another_run_folder(corpus: str, tmp_path: Path) -> None:
    plain = words_of(corpus, tmp_path)
    check_rejected(start(tmp_path, [plain, [*plain, f"--save={tmp_path}/other"]]),
                   "rank 1 on " + os.uname().nodename + " has another folder under this name than rank 0")


@pytest.mark.slow
def test_two_ranks_with_another_json_variable_or_program(corpus: str, tmp_path: Path) -> None:
    plain = words_of(corpus, tmp_path)
    (tmp_path / "other.json").write_text(json.dumps({**config(1), "gradient_clipping": 0.5}))
    check_rejected(start(tmp_path, [plain, [*plain, f"--deepspeed_config={tmp_path}/other.json"]]),
                   "DeepSpeed JSON, gradient_clipping: the ranks must")
    check_rejected(start(tmp_path, [plain, plain], [{}, {"ONEDNN_DEFAULT_FPMATH_MODE": "BF16"}]),
                   'ONEDNN_DEFAULT_FPMATH_MODE: the ranks must have the same value, and it is nothing on rank 0')


@pytest.mark.slow
def test_two_ranks_that_evaluate_something_else(corpus: str, tmp_path: Path) -> None:
    done = start(tmp_path, [words_of(corpus, tmp_path)])
    assert done[0][0] == 0, done
    check_rejected(start(tmp_path, [["run"], ["run", "--max_samples=3"]], module="pretrain evaluate"),
                   "--max_samples: the ranks must")
    found = start(tmp_path, [["run"], ["run"]], module="pretrain evaluate")
    assert [code for code, _ in found] == [0, 0], found
