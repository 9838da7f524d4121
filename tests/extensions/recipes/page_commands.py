"""Commands of the page that tests/test_quickstart.py does not run: see tests/support/pages.py."""

NOT_RUN_BECAUSE: dict[str, tuple[str, ...]] = {
    "takes minutes and needs the network: tests/extensions/recipes/test_reproduce.py": (
        "ds-pretrain reproduce shakespeare-char --scale small",),
    "needs a folder of a recipe: tests/extensions/recipes/test_reproduce.py": (
        "ds-pretrain --config run.yaml", "ds-pretrain --hostfile HOSTS --config run.yaml --save runs/train")}
