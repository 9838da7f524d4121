"""Report of a chaos run: a table with a row for each kind of fault, and lines below it."""

from dataclasses import astuple

from rich.table import Table

from pretrain.chaos.results import ChaosResult, KindResult


def report_table(result: ChaosResult) -> Table:
    """Return the table. Kinds without faults and without consequences are left out."""
    table = Table("fault", box=None, pad_edge=False, header_style="")
    for title in ("faults", "recovered", "restarts", "steps lost", "bytes lost", "wrong results"):
        table.add_column(title, justify="right")
    for name, row in [*result.kinds.items(), ("all", result.total())]:
        if row != KindResult():
            table.add_row(name, *(f"{value:,}" for value in astuple(row)))
    return table


def report_lines(result: ChaosResult) -> list[str]:
    """Return the lines below the table: goodput, comparison with the reference, problems."""
    goodput, (found, expected) = result.goodput, result.hashes
    equal = result.steps - result.missing_steps
    lines = [f"goodput {goodput.fraction:.1%}: {goodput.kept_s:.1f} s of kept steps in {goodput.wall_s:.1f} s, "
             f"without {goodput.relaunch_s:.1f} s of relaunching",
             f"steps: {equal} of {result.steps} of the reference were trained, "
             f"{result.total().wrong_results} logged steps differ",
             f"final weights and optimizer states: SHA-256 {found[:16]}, reference {expected[:16]}"]
    return lines + [f"FAILED  {problem}" for problem in result.problems()]
