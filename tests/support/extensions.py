"""Find what the tests of extensions bring for tests of everything: tests/extensions/NAME/MODULE.py, if it exists."""

import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from tests.support.launch import ROOT


def modules_of_extensions(module: str) -> Iterator[ModuleType]:
    """Import the modules of this name. All names in them are optional.

    page_commands: NOT_RUN_BECAUSE and SMALLER, as in tests/support/pages.py; NOT_PRINTED and check_guide(clone,
    run_command, folder), as in tests/test_quickstart.py.
    wrong_inputs: see tests/wrong_inputs/case.py.
    foreign_files: for tests/foreign_files/commands.py, FILES, PICKLES, PLACES, RUN_FLAGS and commands(world); READERS,
    commands that also read files of others; write_files(world) and write_in_run(run). WITHOUT_DATA: see
    tests/distributed/test_own_datasets.py.
    gpu_runs: KINDS and COMMANDS, as in tests/dry_gpu/test_runs.py; FLAGS_OF_TEXT, more flags of the run of these;
    DETERMINISTIC, flags of tests/gpu/test_runs.py.
    preparations: SOURCES, name -> (corpus, the same as Parquet, folder) -> context manager of the inputs, for
    tests/data/prepare/test_combinations.py.
    shards: merge_shards_of, as in tests/data/prepare/helpers.py.
    sample_orders: ordered_samples(token file, seq_length, seed, data of hypothesis), for tests/data/test_ledger.py.
    device_reads: ALLOWED, as in tests/distributed/test_metrics.py.
    """
    for path in sorted(ROOT.glob(f"tests/extensions/*/{module}.py")):
        yield importlib.import_module(f"tests.extensions.{path.parent.name}.{module}")


def entries_of_extensions(module: str, name: str) -> dict[str, Any]:
    """Return the entries of all dictionaries of a name in these modules."""
    return {key: value for each in modules_of_extensions(module) for key, value in getattr(each, name, {}).items()}
