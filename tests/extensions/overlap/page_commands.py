"""Commands of the page that tests/test_quickstart.py does not run: see tests/support/pages.py."""

NOT_RUN_BECAUSE: dict[str, tuple[str, ...]] = {
    "its data is eleven copies of another; tests/extensions/overlap/test_overlap.py searches smaller data": (
        "time ds-pretrain data overlap data/copies --against runs/quickstart/corpus/valid.jsonl --workers 1",)}
