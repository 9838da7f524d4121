"""`ds-pretrain new`: the files that it writes, its questions, and the five commands from own text to a finished run."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from pretrain.active_extensions import advice_on
from pretrain.commands import check, next_command
from pretrain.commands.prepare import prepare_main
from pretrain.config.ds_json.read import read_ds_config
from pretrain.config.flags.parse import read_yaml
from pretrain.data.prepare.prepare import prepare
from pretrain.data.token_schedules import parse_token_count
from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.errors import ConfigError
from pretrain.extensions.new.answers import TokenizerOfRun, data_of, model_of
from pretrain.extensions.new.layout import best_layout
from pretrain.extensions.new.main import main
from pretrain.extensions.new.sizes import llama_shape
from pretrain.memory.hardware import make_cluster
from pretrain.model.config import load_model_config
from tests.support.launch import ROOT
from tests.support.rejection import rejection
from tests.terminal.test_screen import environment, in_terminal

AT_THE_END = [command.split()[1] for command in advice_on("finished")]  # of a run: what extensions advise
MODELS = {"preset": "pythia-410m", "size": "1.3B", "config.json": "shape.json"}
MACHINES = {"1 a100": "--world_size 1 --gpu a100", "8 a100-40": "--nodes 1 --gpus_per_node 8 --gpu a100-40",
            "2 x 8 h100": "--world_size 16 --gpu h100", "8 v100": "--world_size 8 --gpu v100",
            "2 x 4 of 24 GiB": "--nodes 2 --gpus_per_node 4 --gpu 24", "cpu": "--world_size 2 --gpu cpu"}
SHAPE = {"model_type": "llama", "vocab_size": 500, "hidden_size": 256, "intermediate_size": 512,
         "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 512}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with text, also as token files, and a config.json."""
    folder = tmp_path_factory.mktemp("texts")
    text = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "pretrain").rglob("*.py"))[:100])
    documents = [text[start : start + 4000] for start in range(0, 320_000, 4000)]  # equal, so that a split is exact
    (folder / "own.jsonl").write_text("\n".join(json.dumps({"text": document}) for document in documents))
    (folder / "shape.json").write_text(json.dumps(SHAPE))
    prepare([str(folder / "own.jsonl")], tokenizer="bytes", out=str(folder / "tokens"), workers=1)
    return folder


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """Run the command, and return the lines that it prints."""
    main(list(words))
    return capsys.readouterr().out.splitlines()


def values() -> dict[str, Any]:
    return {name: value for name, (_, value) in read_yaml("run.yaml").items()}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("model", MODELS)
def test_every_pair_passes_check_and_fits(model: str, machine: str, texts: Path,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    """Known data (token files) in half of the cases, and text that is not prepared yet in the others."""
    known = (list(MODELS).index(model) + list(MACHINES).index(machine)) % 2 == 0
    word = str(texts / "shape.json") if model == "config.json" else \
        "20M" if (model, machine) == ("size", "cpu") else MODELS[model]
    data = ["--data", str(texts / ("tokens" if known else "own.jsonl")), "--tokenizer", "bytes"]
    lines = printed(capsys, "run.yaml", *data, "--model", word, *shlex.split(MACHINES[machine]))
    commands = [line.split(": ", 1)[1] for line in lines if line.startswith(("next: ", "then: "))]
    launcher = "--hostfile" if "2 x" in machine else "--num_accelerators" if machine == "cpu" else "--num_gpus"
    assert [command.split()[1] for command in commands] == ["prepare", "check", launcher, *AT_THE_END][int(known):]
    if not known:  # what `ds-pretrain prepare` would write
        with pytest.raises(ConfigError, match=re.escape(f"does not exist yet. First: {commands[0]}")):
            check.main(shlex.split(commands[-3])[2:])
        prefix = Path(values()["train_data"])
        prefix.parent.mkdir(parents=True)
        for suffix in (".bin", ".idx", ".meta.json"):
            os.link(f"{texts / 'tokens'}{suffix}", f"{prefix}{suffix}")
    check.main(shlex.split(commands[-3])[2:])
    out = capsys.readouterr().out
    assert "NOT FIT" not in out
    assert "do not fit" not in out
    assert out.splitlines()[-1] == f"next: {commands[-2]}"
    ds = read_ds_config("run.json").values
    precision = "fp16" if "v100" in machine else "bf16"
    assert ds[precision] == {"enabled": True}
    blocks = Path("run.yaml").read_text().split("\n\n")[1:]  # each has its reason above the values
    assert all(block.startswith("# ") for block in blocks)


@pytest.mark.parametrize("order", ["longest last", "longest first"])
def test_validation_data_of_unequal_documents_is_enough(order: str, texts: Path,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    """The last 3% of the documents may have far fewer tokens than 3%, or than 10%."""
    text = json.loads((texts / "own.jsonl").read_text().splitlines()[0])["text"]
    documents = sorted((text[: 1 + 4000 * number**4 // 200**4] for number in range(200)),
                       key=len, reverse=order == "longest first")
    Path("own.jsonl").write_text("\n".join(json.dumps({"text": document}) for document in documents))
    prepare(["own.jsonl"], tokenizer="bytes", out="tokens", workers=1)
    main(["run.yaml", "--data", "tokens", "--tokenizer", "bytes", "--model", str(texts / "shape.json"),
          *shlex.split(MACHINES["1 a100"]), "--seq_length", "64"])
    check.main(["--config", "run.yaml", "--world_size", "1", "--gpu", "a100"])
    assert values().get("split") == (None if order == "longest last" else "100,0,0")


@pytest.mark.parametrize("size", ["0.5M", "1M", "2M", "5M", "10M", "30M", "70M", "125M", "350M", "760M", "1B", "2B",
                                  "6.7B", "65B", "175B"])
def test_shapes_have_the_size_that_was_asked_for(size: str) -> None:
    """Within 5%, with at least 4 layers and 2 heads; of small ones, the rows of the vocabulary are at most a third."""
    number = parse_token_count(size)
    model = model_of(size, TokenizerOfRun("trained", 32000, to_train=True, can_be_smaller=True)).config
    assert model.num_parameters() == pytest.approx(number, rel=0.05)
    assert model.num_layers >= 4
    assert model.num_heads >= 2
    layers_of_128 = model.num_layers / (model.hidden_size / 128)  # 0.9 to 3 in published models; tiny ones have more
    assert 0.7 < layers_of_128 < (32 if number < 2e6 else 10 if number < 20e6 else 3.5) + 1e-9
    assert model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2) <= number * 1.05 / 3


def test_a_vocabulary_that_was_asked_for_remains(texts: Path) -> None:
    """A tokenizer that exists, or --vocab_size, is not made smaller; a model too small for it is rejected."""
    for tokenizer in (TokenizerOfRun("file", 32000), TokenizerOfRun("trained", 32000, to_train=True)):
        with pytest.raises(ConfigError, match="there is no Llama of 1,000,000 parameters with a vocabulary of 32,000; "
                                              "the smallest one has 2,"):
            model_of("1M", tokenizer)
        model = model_of("5M", tokenizer)
        assert model.tokenizer == tokenizer
        assert model.config.num_layers >= 4


def test_a_model_that_does_not_fit_names_the_smallest_number_of_gpus(texts: Path,
                                                                     capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--data", str(texts / "own.jsonl"), "--tokenizer", "bytes", "--model", "13B", "--gpu", "v100-16"]
    with pytest.raises(ConfigError, match=r"do not fit 1 v100-16 GPU;.* Give at least \d+ v100-16 GPUs") as raised:
        main(["run.yaml", *flags, "--world_size", "1"])
    enough = int(re.findall(r"at least (\d+)", str(raised.value).replace(",", ""), re.IGNORECASE)[0])
    assert not list(Path().iterdir())
    with pytest.raises(ConfigError, match="do not fit"):
        main(["run.yaml", *flags, "--world_size", str(enough - (1 if enough <= 8 else 8))])
    assert f"--world_size {enough}" in "".join(printed(capsys, "run.yaml", *flags, "--world_size", str(enough)))


def test_the_simplest_layout_that_fits_is_recommended() -> None:
    model, cluster = load_model_config("gpt2"), make_cluster(gpu="h100", world_size=8, nodes=None, gpus_per_node=8)
    row = best_layout(model, cluster, seq_length=1024, batch_tokens=2**19)
    assert row.candidate.name == "zero1"


def test_the_size_of_a_model_is_advised() -> None:
    assert "`ds-pretrain new run.yaml --model 1.3B`" in rejection(load_model_config, "1.3B")


def test_urls_with_signatures_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"--data https://host/a: its password or signature would be written into"):
        data_of(["https://host/a?Signature=secret"], "text", "tokens")


def test_no_number_of_gpus_is_enough(texts: Path) -> None:
    model = llama_shape(10**9, 32000, "--model")[1]
    with pytest.raises(ConfigError, match="Give larger GPUs, or a smaller model"):
        best_layout(model, make_cluster(gpu="0.0001", world_size=1, nodes=None, gpus_per_node=None), seq_length=128,
                    batch_tokens=128)


def test_flags_that_are_missing_or_contradict(texts: Path, monkeypatch: pytest.MonkeyPatch,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal: one line that names the flag. Files are overwritten only on demand."""
    right = {"--data": str(texts / "own.jsonl"), "--model": "1M", "--tokenizer": "bytes", "--gpu": "cpu"}

    def error(**changed: str | None) -> str:
        flags = {**right, **{f"--{name}": value for name, value in changed.items()}}
        return rejection(main, ["run.yaml", *(word for pair in flags.items() if pair[1] for word in pair)])

    assert error(data=None).startswith("--data: the flag is missing.")
    assert error(model=None).startswith("--model: the flag is missing.")
    assert error(gpu=None, world_size="16").startswith("--gpu: the flag is missing.")
    assert error(gpu="a100").startswith("--gpus_per_node: the flag is missing.")
    assert error(tokens="1B", steps="5").startswith("--tokens / --steps: found both")
    assert error(tokens="many").startswith("--tokens: found 'many'")
    assert error(vocab_size="3000").startswith("--vocab_size: it has no effect")
    assert error(jsonl_key="content").startswith(f"{texts / 'own.jsonl'}:1:")
    assert error(data=str(texts / "tokens"), tokenizer="train").startswith("--tokenizer train: ")
    assert error(model="1K").startswith("--model 1K: there is no Llama")
    assert error(seq_length="100000").startswith("--seq_length: found 100000; expected at most")
    assert not Path("run.yaml").exists()
    words = ["run.yaml", *(word for pair in right.items() for word in pair)]
    printed(capsys, *words)
    before = Path("run.json").read_bytes()
    Path("run.yaml").unlink()
    with pytest.raises(ConfigError, match=r"^run\.json: the file exists"):
        main(words)
    printed(capsys, *words, "--overwrite", "--seq_length", "64")
    assert Path("run.json").read_bytes() != before
    assert values()["seq_length"] == "64"


@pytest.mark.parametrize(("reported", "chosen"), [
    ("NVIDIA A100-SXM4-80GB, 81920", "--world_size 4 --gpu a100"),
    ("NVIDIA RTX 6000 Ada Generation, 49140", "--world_size 4 --gpu rtx6000-ada"),
    ("NVIDIA RTX PRO 5000 Blackwell, 48935", "--world_size 4 --gpu 47.8"),
    ("NVIDIA GB10, [N/A]", "--gpu: the flag is missing")])
def test_the_gpus_of_this_machine_are_the_default(reported: str, chosen: str, texts: Path, empty_folder: Path,
                                                  monkeypatch: pytest.MonkeyPatch,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    """A program nvidia-smi stands for four GPUs. A GPU that is not in the table has an H100's rates."""
    smi = empty_folder / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\nfor gpu in 1 2 3 4; do echo '{reported}'; done\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{empty_folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    try:
        lines = printed(capsys, "run.yaml", "--data", str(texts / "own.jsonl"), "--tokenizer", "bytes", "--model", "2M")
    except ConfigError as error:
        lines = [str(error)]
    assert chosen in "".join(lines)


def test_the_questions_on_a_terminal(texts: Path, empty_folder: Path) -> None:
    """A wrong answer is asked again, an empty one takes the default, and --steps leaves out a question."""
    answers = [("data: ", ["nowhere", str(texts / "own.jsonl")]), ("tokenizer: ", ["bytes"]),
               ("model: ", ["gpt-five", "2M"]), ("GPUs: ", ["z80", "cpu"]), ("ranks on this machine [1]: ", ["0", "2"]),
               ("nodes [1]: ", [""]), ("run folder [runs/run]: ", ["runs/mine"])]
    waiting = [(question, answer) for question, several in answers for answer in several]
    seen = 0

    def see(terminal: int, written: str) -> None:
        nonlocal seen
        if waiting and waiting[0][0] in written[seen:] and written.endswith("]: " if "[" in written[-30:] else ": "):
            seen = len(written)
            os.write(terminal, f"{waiting.pop(0)[1]}\n".encode())

    code, written = in_terminal([sys.executable, "-m", "pretrain", "new", "run.yaml", "--steps", "9"], see,
                                cwd=empty_folder, columns=200)
    assert (code, waiting) == (0, []), written
    for wrong in ("nowhere: there is no such file", "there is no preset, file or folder 'gpt-five'",
                  "--gpu: found 'z80'", "found '0'; expected a whole number from 1"):
        assert wrong in written
    assert values()["save"] == "runs/mine"
    assert values()["train_steps"] == "9"
    assert "next: ds-pretrain prepare" in written


def test_five_commands_from_own_text_to_a_finished_run(texts: Path, empty_folder: Path) -> None:
    """`new` prints the first command, and each command the next one: a model of 1 M parameters, on two CPU ranks."""
    command = f"ds-pretrain new run.yaml --data {texts}/own.jsonl --model 1M --vocab_size 1000 --gpu cpu " \
              "--world_size 2 --seq_length 128 --steps 4"
    environ = {**environment(), "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
               "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    used, also = [], []
    while command:
        used.append(command)
        done = subprocess.run(shlex.split(command), cwd=empty_folder, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        command = next((line.removeprefix("next: ") for line in done.stdout.splitlines()
                        if line.startswith("next: ")), "")
        also += [line.removeprefix("also: ") for line in done.stdout.splitlines() if line.startswith("also: ")]
    assert [line.split()[1] for line in used] == ["new", "prepare", "check", "--num_accelerators", *AT_THE_END]
    assert [line.split()[1] for line in also] == ["generate", "evaluate", "export"]
    for line in also:
        words = shlex.split(line.replace("TEXT", "'def '").replace("FOLDER", "exported"))
        done = subprocess.run(words, cwd=empty_folder, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (empty_folder / "runs/run/metrics.jsonl").read_text().splitlines()]
    assert max(row["step"] for row in rows) == 4
    listed = [line.removeprefix(next_command.LISTED) for line in (empty_folder / "run.yaml").read_text().splitlines()
              if line.startswith(next_command.LISTED)]
    assert listed == used[1:]


def test_prepare_trains_a_missing_tokenizer_once(texts: Path, empty_folder: Path, monkeypatch: pytest.MonkeyPatch,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    def printed_by(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["prepare", *words, "--tokenizer", "t", "--vocab_size", "600", "--out", "out",
                                          "--workers", "1", "--overwrite"])
        prepare_main()
        return capsys.readouterr().out

    with pytest.raises(ConfigError, match="--vocab_size: standard input can be read only once"):
        printed_by("-")
    assert "600 pieces, trained" in printed_by(str(texts / "own.jsonl"))
    (model,) = empty_folder.glob("t/tokenizer.model")
    written = model.stat().st_mtime_ns
    last = printed_by(str(texts / "own.jsonl"))
    assert "trained" not in last
    assert model.stat().st_mtime_ns == written
    assert last.splitlines()[-1] == "next: ds-pretrain new run.yaml --data out"


def test_files_without_text_are_left_out_on_demand(texts: Path, empty_folder: Path,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    """`new` comes before `prepare`: it passes the answer on."""
    (empty_folder / "text").mkdir()
    (empty_folder / "text/own.jsonl").write_bytes((texts / "own.jsonl").read_bytes())
    (empty_folder / "text/a.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    words = ["run.yaml", "--data", "text", "--model", "1M", "--gpu", "cpu", "--world_size", "1"]
    assert rejection(main, words).endswith("this is a PNG image, which is not read. Leave it out. --on_error skip "
                                           "leaves such files out.")
    (command,) = (line for line in printed(capsys, *words, "--on_error", "skip") if line.startswith("next: "))
    assert command.endswith(" --on_error skip")


def test_the_next_command_without_a_list(texts: Path) -> None:
    assert next_command.after_prepare("data/corpus") == "ds-pretrain new run.yaml --data data/corpus"
    assert next_command.after_check(["--config", str(ROOT / "launch/quickstart.yaml"), "--seed", "1"], world_size=64,
                                    device="cuda").startswith("ds-pretrain --hostfile HOSTS --config ")
    assert next_command.after_tokenizer(["my text"], Path("data/t"), []) == \
        "ds-pretrain prepare 'my text' --tokenizer data/t --out data/tokens"


def test_text_with_line_breaks_begins_no_key(texts: Path, empty_folder: Path,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    """Neither the tokenizer that a .meta.json names nor the names of files begin a key or a command in run.yaml."""
    injected = "".join(f"{line_break}model_code: x" for line_break in ("\n", "\r", "\x85", "\u2028"))
    folder = empty_folder / f"data{injected}"
    folder.mkdir()
    for path in texts.glob("tokens*"):
        (folder / path.name).write_bytes(path.read_bytes())
    tokenizer = folder / "tokenizer.json"
    Tokenizer(WordLevel({"<|endoftext|>": 256, **{f"w{number}": number for number in range(256)}},
                        unk_token="w0")).save(str(tokenizer))
    meta = json.loads((folder / "tokens.meta.json").read_text())
    (folder / "tokens.meta.json").write_text(json.dumps({
        **meta, "tokenizer": str(tokenizer), "tokenizer_sha256": load_tokenizer(tokenizer).fingerprint}))
    run = empty_folder / f"run{injected}.yaml"
    printed(capsys, str(run), "--data", str(folder / "tokens"), "--model", "1M", "--world_size", "1",
            "--gpu", "cpu", "--save", "runs/new")
    values = yaml.safe_load(run.read_text(encoding="utf-8"))
    assert values["tokenizer"] == str(tokenizer)
    assert values["train_data"] == str(folder / "tokens")
    assert "model_code" not in values
    read_ds_config(str(run.with_suffix(".json")))
