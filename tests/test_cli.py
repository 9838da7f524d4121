"""Exit codes and one-line errors of every program, and suggestions for misspelt words."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.cli import Parser, number, path, whole_number
from pretrain.errors import ConfigError, closest, format_number
from pretrain.paths import check_outside_runs
from tests.support.launch import PROGRAM
from tests.support.rejection import rejection


def run(body: str) -> subprocess.CompletedProcess[str]:
    program = f"import sys\nfrom pretrain.cli import run_main\nfrom pretrain.errors import ConfigError\n{body}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=900)


@pytest.mark.parametrize(("body", "code", "stderr"), [
    ("run_main(lambda: None)", 0, ""),
    ("run_main(lambda: 75)", 75, ""),
    ("def f(): raise ConfigError('x', found=1, expected='2')\nrun_main(f)", 2,
     "ds-pretrain: error: x: found 1; expected 2.\n"),
    ("def f(): raise KeyboardInterrupt\nrun_main(f)", 130, "ds-pretrain: interrupted\n"),
])  # fmt: skip
def test_exit_codes(body: str, code: int, stderr: str) -> None:
    done = run(body)
    assert (done.returncode, done.stderr) == (code, stderr)


def test_a_closed_pipe_gives_exit_code_141() -> None:
    body = "from pretrain.cli import run_main\ndef f():\n  for i in range(10**6): print(i)\nrun_main(f)"
    done = subprocess.run(["bash", "-c", f'{sys.executable} -c "$0" | head -1; echo ${{PIPESTATUS[0]}}', body],
                          capture_output=True, text=True, timeout=900)
    assert (done.stdout, done.stderr) == ("0\n141\n", "")


@pytest.mark.parametrize("body", ["print('done')", "print('x\\n' * 10**6)", "print('--help'); sys.exit(0)"])
@pytest.mark.parametrize("redirections", ["> /dev/full", "> /dev/full 2>&1"])
def test_a_full_disk_under_stdout_is_one_line(body: str, redirections: str) -> None:
    program = f"import sys\nfrom pretrain.cli import run_main\ndef f():\n  {body}\nrun_main(f)"
    done = subprocess.run(["bash", "-c", f'{sys.executable} -c "$0" {redirections}', program], capture_output=True,
                          text=True, timeout=900)
    line = "ds-pretrain: error: the output cannot be written: No space left on device.\n"
    assert (done.returncode, done.stderr) == (1, line if "2>" not in redirections else "")


def test_closed_stdout_and_stderr_are_no_errors() -> None:
    body = """
from pretrain.cli import run_main
from pretrain.progress import ProgressBar
def f():
    with ProgressBar("reading", 10) as progress:
        progress.advance(10, "")
    print("done")
run_main(f)"""
    done = subprocess.run(["bash", "-c", f'{sys.executable} -c "$0" >&- 2>&-', body], timeout=900)
    assert done.returncode == 0


def test_help_in_a_pipe_of_a_program_that_ends_at_once() -> None:
    command = [sys.executable, PROGRAM, "evaluate", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--max_samples" in done.stdout


def make_parser() -> Parser:
    parser = Parser(prog="x")
    parser.add_argument("--vocab_size", type=int)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--text")
    parser.add_argument("--kind", choices=("a", "b"))
    parser.add_argument("--megabytes", type=number(above=True))
    parser.add_argument("--count", type=whole_number(1, 9))
    parser.add_argument("--path", type=path)
    parser.add_argument("rest", nargs="*")
    return parser


def test_flags_accept_hyphens_and_underscores() -> None:
    for words in (["--vocab_size", "4", "--dry-run"], ["--vocab-size=4", "--dry_run"]):
        args = make_parser().parse_args(words)
        assert (args.vocab_size, args.dry_run) == (4, True)
    assert make_parser().parse_args(["--text=--vocab-size", "--", "--dry_run"]).rest == ["--dry_run"]
    assert make_parser().parse_args(["--text=--vocab-size"]).text == "--vocab-size"


@pytest.mark.parametrize(("words", "message"), [
    (["--vocab_sice", "4"], 'Did you mean "--vocab_size"?'),
    (["--vocab", "4"], "--vocab: there is no such flag."),
    (["--vocab_size", "x"], "--vocab_size: found 'x'; expected a whole number."),
    (["--vocab_size"], "--vocab_size: the value is missing."),
    (["--dry_run=1"], "--dry-run: this flag takes no value"),
    (["--kind", "c"], "--kind: found 'c'; expected one of a, b."),
    (["--megabytes", "nan"], "--megabytes: found 'nan'; expected a number above 0."),
    (["--count", "0"], "--count: found '0'; expected a whole number from 1 to 9."),
    (["--count", str(10**400)], "expected a whole number from 1 to 9."),
    (["--path", "~/x"], "was not expanded by the shell"),
    (["--path", "n" * 300], "is too long for a file"),
    (["--path", ""], "--path: the value is empty; leave the flag out, or give it a value."),
])  # fmt: skip
def test_wrong_flags_raise_config_errors(words: list[str], message: str) -> None:
    assert message in rejection(make_parser().parse_args, words)


@pytest.mark.parametrize(("words", "message"), [
    (["--ouput", "x"], '--ouput: there is no such flag. Did you mean "--output"?'),
    (["--text", "x"], "--output: it is required"),
])  # fmt: skip
def test_a_misspelt_required_flag_is_reported_by_its_name(words: list[str], message: str) -> None:
    parser = make_parser()
    parser.add_argument("--output", required=True)
    assert message in rejection(parser.parse_args, words)


def test_a_new_run_in_another_run_is_rejected(tmp_path: Path) -> None:
    """Foreign files called run.json make no run of a folder, and a run that exists may lie anywhere."""
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "run.json").write_text("{}")
    check_outside_runs(tmp_path / "foreign" / "new", "--save")
    for folder in (tmp_path / "outer", tmp_path / "outer" / "inner"):
        folder.mkdir()
        for name in ("run.json", "events.jsonl"):
            (folder / name).touch()
    check_outside_runs(tmp_path / "outer" / "inner", "--save")
    with pytest.raises(ConfigError, match="lies in the run folder"):
        check_outside_runs(tmp_path / "outer" / "new", "--save")


KNOWN = ("tiny", "gpt2", "comet", "stage", "bf16", "fp16", "lr", "overlap_comm", "train_batch_size",
         "cpu_checkpointing", "zero_optimization", "stage3_param_persistence_threshold")


@pytest.mark.parametrize(("word", "known", "meant"), [
    ("c", ["a", "b"], ""), ("tp", ["sp"], "sp"), ("node4", ["node1", "node2"], ""), ("node2", ["node1"], "node1"),
    ("nod2", ["node1", "node2"], "node2"), ("llama3-7b", ["llama2-7b", "llama3-8b"], ""),
])
def test_words_with_little_in_common_and_numbers_are_not_suggested(word: str, known: list[str], meant: str) -> None:
    assert closest(word, known) == meant


@pytest.mark.parametrize(("word", "meant"), [
    ("stge", "stage"), ("tiyn", "tiny"), ("lrr", "lr"), ("gtp2", "gpt2"), ("bfp16", "bf16"), ("FP16", "fp16"),
    ("zero_optimisation", "zero_optimization"), ("stage3_param_persitance_threshold", KNOWN[-1]),
    ("comm_overlap", "overlap_comm"), ("train_batch", "train_batch_size"), ("cpu_checkpoint", "cpu_checkpointing"),
    ("_comment", ""), ("gptj", ""), ("fp8", ""), ("monitor", ""), ("", ""),
])
def test_suggested_words(word: str, meant: str) -> None:
    assert closest(word, iter(KNOWN)) == meant


@pytest.mark.parametrize("words", [["--help"], ["import", "--help"], ["check", "--help"],
                                   ["export", "--help"]], ids=" ".join)
def test_lists_and_help_fit_80_columns(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "pretrain", *words], capture_output=True, text=True, timeout=900,
                          env={**os.environ, "COLUMNS": "80"})
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if len(line) > 80] == []


def test_numbers_are_printed_without_exponents() -> None:
    found = [format_number(value) for value in (0.01234, 1.5, 99.94, 99.96, 101.2, 1730.4, -1730.4, 2.5e6)]
    assert found == ["0.0123", "1.5", "99.9", "100", "101", "1,730", "-1,730", "2,500,000"]
    assert [format_number(value, 4) for value in (1.23456, 999.94, 1e4)] == ["1.235", "999.9", "10,000"]
    units = re.compile(r":,?\.\dg\} (ms|s|us|minutes|steps|samples|times)\b")
    lines = [f"{path}: {line.strip()}" for path in (Path(__file__).parents[1] / "pretrain").rglob("*.py")
             for line in path.read_text(encoding="utf-8").splitlines() if units.search(line)]
    assert lines == []
