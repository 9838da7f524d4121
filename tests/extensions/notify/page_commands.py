"""Commands of the page that tests/test_quickstart.py does not run: see tests/support/pages.py."""

NOT_RUN_BECAUSE: dict[str, tuple[str, ...]] = {
    "needs receivers and GPUs: tests/extensions/notify/test_follow_run.py": (
        "ds-pretrain supervise -- ds-pretrain --num_gpus 8 --config run.yaml --notify SLACK_URL MAIL_URL",
        "ds-pretrain --num_gpus 8 --config run.yaml --metrics_port 9100")}
