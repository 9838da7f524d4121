"""Commands of the page that tests/test_quickstart.py does not run: see tests/support/pages.py."""

NOT_RUN_BECAUSE: dict[str, tuple[str, ...]] = {
    "tests/extensions/health/test_doctor.py runs it; its exit code depends on the machine": (
        "ds-pretrain doctor --save runs/first",
        "ds-pretrain doctor --hostfile HOSTS --config run.yaml",
        "ds-pretrain doctor --hostfile HOSTS --measure --config run.yaml"),
    "needs several hosts: tests/extensions/health/test_hosts.py": (
        "ds-pretrain check-cluster --hostfile HOSTS --config run.yaml",
        "srun ds-pretrain check-cluster --config run.yaml"),
}
