"""Commands of the page that tests/test_quickstart.py does not run, and why."""

NOT_RUN_BECAUSE = {
    "takes minutes: tests/extensions/wrapped/test_decoders.py": (
        "ds-pretrain models --prove --output pretrain/extensions/wrapped/decoders.csv",)}
