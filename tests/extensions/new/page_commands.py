"""Commands of the page that tests/test_quickstart.py does not run: see tests/support/pages.py."""

NOT_RUN_BECAUSE: dict[str, tuple[str, ...]] = {
    "needs text of one's own: tests/extensions/new/test_new.py": (
        "ds-pretrain new run.yaml --data 'text/*.jsonl' --model 1.3B --nodes 2 --gpus_per_node 8 --gpu a100",)}
