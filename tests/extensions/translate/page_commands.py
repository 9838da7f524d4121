"""Commands of the page that tests/test_quickstart.py does not run, and why."""

NOT_RUN_BECAUSE = {
    "needs a file of GPT-NeoX; tests/extensions/translate/test_translate.py translates a short form of it": (
        "ds-pretrain translate configs/20B.yml --output runs/neox-20b",)}
