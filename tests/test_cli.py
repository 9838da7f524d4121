"""Exit codes and one-line errors of every program."""

import subprocess
import sys

import pytest

from pretrain.cli import Parser
from pretrain.errors import ConfigError


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


def test_a_reader_that_leaves_is_no_crash() -> None:
    body = "from pretrain.cli import run_main\ndef f():\n  for i in range(10**6): print(i)\nrun_main(f)"
    done = subprocess.run(["bash", "-c", f'{sys.executable} -c "$0" | head -1; echo ${{PIPESTATUS[0]}}', body],
                          capture_output=True, text=True, timeout=900)
    assert (done.stdout, done.stderr) == ("0\n141\n", "")


def parser() -> Parser:
    made = Parser(prog="x")
    made.add_argument("--vocab_size", type=int)
    made.add_argument("--dry-run", action="store_true")
    made.add_argument("--text")
    made.add_argument("rest", nargs="*")
    return made


def test_both_spellings_of_a_flag() -> None:
    for words in (["--vocab_size", "4", "--dry-run"], ["--vocab-size=4", "--dry_run"]):
        args = parser().parse_args(words)
        assert (args.vocab_size, args.dry_run) == (4, True)
    assert parser().parse_args(["--text=--vocab-size", "--", "--dry_run"]).rest == ["--dry_run"]
    assert parser().parse_args(["--text=--vocab-size"]).text == "--vocab-size"


@pytest.mark.parametrize(("words", "message"), [
    (["--vocab_sice", "4"], 'did you mean "--vocab_size"?'),
    (["--vocab", "4"], "unrecognized arguments: --vocab"),
    (["--vocab_size", "x"], "invalid int value: 'x'"),
    (["--vocab_size"], "expected one argument"),
])  # fmt: skip
def test_errors_are_config_errors(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parser().parse_args(words)
    assert message in str(error.value)
