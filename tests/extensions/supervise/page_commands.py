"""Commands of the page that tests/test_quickstart.py does not run: see tests/support/pages.py."""

NOT_RUN_BECAUSE: dict[str, tuple[str, ...]] = {
    "needs several hosts: tests/extensions/supervise/test_hosts.py": (
        "ds-pretrain supervise --hostfile HOSTS --min_hosts 6 -- ds-pretrain --hostfile HOSTS --config run.yaml",),
    "takes minutes: tests/extensions/supervise/chaos/test_chaos.py": (
        "python -m tests.extensions.supervise.chaos --faults 20 --seed 1 -- ds-pretrain --num_accelerators 2 --config "
        "runs/quickstart/quickstart.yaml --deepspeed_config zero1_bf16 --gradient_accumulation_steps 2 "
        "--train_steps 60 --save_interval 4 --keep_checkpoints 3 --async_save --save runs/chaos",)}
