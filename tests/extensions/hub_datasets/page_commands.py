"""Commands of the page that tests/test_quickstart.py does not run: see tests/support/pages.py."""

NOT_RUN_BECAUSE: dict[str, tuple[str, ...]] = {
    "needs the Hub: tests/extensions/hub_datasets/test_hub_dataset.py": (
        "ds-pretrain prepare --dataset HuggingFaceFW/fineweb-edu --dataset_config sample-10BT --tokenizer "
        "data/tokenizer --out data/fineweb",)}
