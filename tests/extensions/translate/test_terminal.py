"""The output of the subcommand fits a terminal."""

from pathlib import Path

from tests.terminal.test_screen import check_table
from tests.test_cli import test_lists_and_help_fit_80_columns as check_width


def test_its_help_and_its_table_fit_the_terminal(tmp_path: Path) -> None:
    check_width(["translate", "--help"])
    check_table("translate --output out -- run_clm.py --config_name gpt2 --output_dir run --bf16 --train_file some.txt "
                "--do_train --max_steps 100 --warmup_ratio 0.1 --dataloader_num_workers 4", 6, tmp_path)
