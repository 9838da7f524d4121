"""Commands of the page that tests/test_quickstart.py does not run, and why."""

NOT_RUN_BECAUSE = {
    "a measurement, of no result that a test could check": ("python -m tests.extensions.slow_ranks.cost",),
    "takes an hour: tests/extensions/slow_ranks/test_planted.py with -m slow": (
        "python -m tests.extensions.slow_ranks.plant --plant slow_link throttled niced stopped slow_reads --block_s "
        "0.5 --seconds 200",
        "python -m tests.extensions.slow_ranks.plant --healthy 20 --block_s 0.25 --blocks 80 --layouts zero1 zero3 "
        "pipeline2"),
    "needs several hosts: tests/extensions/slow_ranks/test_host_excluded.py": (
        "ds-pretrain supervise --min_hosts 6 --exclude_stragglers -- ds-pretrain --hostfile HOSTS --config run.yaml",
        "ds-pretrain --exclude_stragglers --hostfile HOSTS --config run.yaml"),
}
