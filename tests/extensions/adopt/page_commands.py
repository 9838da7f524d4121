"""Commands of the pages that tests/test_quickstart.py does not run, and why."""

NOT_RUN_BECAUSE: dict[str, tuple[str, ...]] = {
    "needs a run of another program: tests/extensions/adopt/test_adopted_runs.py": (
        "ds-pretrain import trainer_output --save runs/adopted",
        "ds-pretrain check --world_size 8 --config runs/adopted/run.yaml --train_data data/corpus --seq_length 2048",
        "ds-pretrain --num_gpus 8 --config runs/adopted/run.yaml --train_data data/corpus --seq_length 2048"),
    "needs a run of another program: tests/extensions/adopt/test_torchtitan.py": (
        "ds-pretrain import outputs/checkpoint --step 6000 --model CONFIG --seq_length 8192 --save "
        "runs/from-torchtitan",
        "ds-pretrain import megatron-checkpoints --save runs/from-megatron"),
    "needs torchtitan and Megatron Core: tests/extensions/adopt/test_dcp_runs.py stands for them": (
        "python -m tests.extensions.adopt.adopted_dcp torchtitan=PYTHON megatron_core=PYTHON",),
    "needs clones of two programs: tests/extensions/adopt/test_megatron_runs.py stands for them": (
        "python -m tests.extensions.adopt.peer_programs OUT CORPUS CLONES",),
    "takes an hour: tests/extensions/adopt/test_adopted_runs.py with -m slow": (
        "python -m tests.extensions.adopt.adopted",)}
