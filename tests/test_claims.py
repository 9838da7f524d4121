"""The computed numbers of pretrain/pages/measurements.md: outputs of commands and tables beside it, computed again.

What was measured depends on the machine, and is not repeated.
"""

import csv
import re
import shlex
from itertools import groupby
from pathlib import Path

import pytest
import torch

from pretrain.commands import COMMANDS, check
from pretrain.config.layout import Layout
from pretrain.memory.estimate.estimate_memory import estimate_memory
from pretrain.memory.footprint import GIB
from pretrain.model.config import load_model_config
from pretrain.model.flops import exact_flops_per_token, flops_per_token
from pretrain.model.init import initialize_parameters
from pretrain.model.layer_specs import as_module
from pretrain.model.recompute import Recompute
from pretrain.model.recomputed_flops import more_flops
from tests.support.launch import ROOT
from tests.support.sparse_data import write_sparse_data

FOLDER = ROOT / "pretrain/pages/measurements"
TEXT = FOLDER.with_suffix(".md").read_text(encoding="utf-8")


def table(name: str) -> list[list[str]]:
    """Return the cells of the rows of claims_NAME.csv."""
    lines = (FOLDER / f"claims_{name}.csv").read_text(encoding="utf-8").splitlines()
    return list(csv.reader(line for line in lines if not line.startswith("#")))[1:]


def commands_with_outputs(subcommand: str) -> list[tuple[list[str], list[str]]]:
    """Return (commands, lines of their output) of groups of commands with a subcommand of ds-pretrain."""
    groups = [[text for _, _, text in rows] for _, rows in groupby(table("outputs"), key=lambda row: row[1])]
    return [each for each in zip(groups[::2], groups[1::2], strict=True)
            if each[0][0].startswith(f"ds-pretrain {subcommand} ")]


def is_printed(line: str, printed: str) -> bool:
    """Return whether a line is in an output, apart from the width of columns; "..." stands for any text."""
    pattern = r"\s+".join(re.escape(word) for word in line.split()).replace(re.escape("..."), ".*")
    return re.search(rf"^\s*{pattern}\s*$", printed, re.MULTILINE) is not None


@pytest.mark.parametrize(("commands", "output"), commands_with_outputs("compare"),
                         ids=lambda lines: shlex.split(lines[0])[3] if lines[0].startswith("ds-") else "")
def test_compare_prints_the_outputs(commands: list[str], output: list[str],
                                                capsys: pytest.CaptureFixture[str]) -> None:
    main = COMMANDS["compare"].load()
    for command in commands:
        main(shlex.split(command)[2:])
    printed = capsys.readouterr().out
    assert [line for line in output if not is_printed(line, printed)] == []


def test_check_prints_the_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    """With data of zeros, and without the tokenizer, instead of a quickstart."""
    (commands, output), = commands_with_outputs("check")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/quickstart/data").mkdir(parents=True)
    lines = (ROOT / "launch/quickstart.yaml").read_text().splitlines()
    (tmp_path / "runs/quickstart/quickstart.yaml").write_text(
        "\n".join(line for line in lines if not line.startswith("tokenizer")))
    for name in ("train", "valid"):
        write_sparse_data(tmp_path / "runs/quickstart/data" / name, num_documents=2000, full_documents=2000, length=256)
    for command in commands:
        check.main(shlex.split(command)[2:])
    printed = capsys.readouterr().out
    assert [line for line in output if not is_printed(line, printed)] == []


def test_zero_divides_the_states_as_the_page_says() -> None:
    undivided = estimate_memory(None, Layout(), num_parameters=7e9).device_bytes
    for ranks, *factors in table("zero_division"):
        for zero_stage, factor in zip((1, 2, 3), factors, strict=True):
            layout = Layout(world_size=int(ranks), zero_stage=zero_stage)
            found = undivided / estimate_memory(None, layout, num_parameters=7e9).device_bytes
            assert round(found, 1 if "." in factor else 0) == float(factor), (ranks, zero_stage)


def test_recomputation_adds_the_flops_of_the_page() -> None:
    choices = (("blocks", 1), ("blocks", 2), ("blocks", 3), ("attention", 1), ("mlp", 1))
    for name, tokens, *cells in table("recomputation_flops"):
        model = load_model_config(name)
        found = [more_flops(model, Recompute(part, every), int(tokens)) for part, every in choices]
        assert [f"{each:.1%}" for each in found] == cells, name


def test_attention_has_the_share_of_flops_of_the_page() -> None:
    for name, tokens in (("gpt3-175b", 2048), ("gpt3-1.3b", 2048), ("llama3-8b", 8192)):
        model = load_model_config(name)
        total = flops_per_token(model, tokens)
        share = 12 * model.num_layers * model.num_heads * model.head_size * tokens / total
        assert f"{share:.1%}" in TEXT, name


def test_longer_sequences_add_the_flops_of_the_page() -> None:
    model = load_model_config("tiny", "vocab_size=4096,n_embd=256,n_layer=6,n_head=4,n_positions=4096")
    for length, factor, *_ in table("attention"):
        found = exact_flops_per_token(model, int(length)) / exact_flops_per_token(model, 256)
        assert f"{found:.2f}".removesuffix(".00") == factor, length


def test_the_price_of_offload_follows_from_the_steps() -> None:
    (_, output), = (each for each in commands_with_outputs("compare") if "optimizer_cpu" in each[0][0])
    seconds = [float(re.findall(r"([\d.]+) s ", line)[0]) for line in output]
    (_, *cells), = table("offload")
    assert [f"{offload / plain:.1f}" for plain, offload in zip(seconds[::2], seconds[1::2], strict=True)] == cells


def test_the_numbers_of_the_summary_follow_from_the_outputs() -> None:
    outputs = {shlex.split(commands[0])[3]: [line.split() for line in output]
               for commands, output in commands_with_outputs("compare")}
    seconds = {name: [float(row[row.index("s") - 1]) for row in rows if "s" in row] for name, rows in outputs.items()}
    v100, a100, h100 = (seconds["gpt2-xl"][first + 1] / seconds["gpt2-xl"][first] for first in (0, 2, 4))
    assert v100 < h100 < a100
    assert f"{v100:.1f} (V100) to {a100:.1f} (A100)" in TEXT
    in_16_bits, in_32_bits = (float(row[7]) for row in outputs["gpt2-xl"][:2])
    assert f"divided by {in_32_bits / in_16_bits:.1f} (computed)" in TEXT
    one, many, one_of_8, many_of_8 = seconds["gpt3-1.3b"]
    assert f"{one / many:.2f} to {one_of_8 / many_of_8:.2f} of 512 times" in TEXT
    parameters = load_model_config("llama2-7b").num_parameters()
    zero3, zero1 = (sum(map(float, row[4:7])) * GIB / parameters for row in outputs["llama2-7b"][:2])
    assert f"{zero1:.0f} bytes a parameter on a single GPU, with ZeRO-3 {zero3:.0f}" in TEXT


INITIAL = [(cells, cells[0].split()[0]) for cells in table("first_loss")]
FAST = ("tiny", "gpt2")


@pytest.mark.parametrize("cells", [pytest.param(cells, id=name, marks=() if name in FAST else pytest.mark.slow)
                                   for cells, name in INITIAL])
def test_the_loss_at_the_start(cells: list[str]) -> None:
    name, _, overrides = cells[0].partition(" with ")
    model = load_model_config(name, ",".join(filter(None, ["vocab_size=4096", overrides])))
    module = as_module(model).eval()
    initialize_parameters(module, model, seed=1)
    tokens_BT, labels_BT = (torch.randint(4096, (4, 64), generator=torch.Generator().manual_seed(seed))
                            for seed in (1, 2))
    with torch.no_grad():
        loss = float(module(tokens_BT, labels_BT, torch.full(tokens_BT.shape, 1 / tokens_BT.numel())))
    expected = float(torch.tensor(4096.0).log()) + model.hidden_size * model.initializer_range ** 2 / 2
    assert [str(model.hidden_size), f"{expected:.3f}"] == cells[1:3]
    assert loss == pytest.approx(float(cells[3]), abs=0.002)
