"""Commands of the page that tests/test_quickstart.py does not run: see tests/support/pages.py."""

NOT_RUN_BECAUSE: dict[str, tuple[str, ...]] = {
    "takes an hour: tests/extensions/replay/test_replay.py with -m slow": (
        "python -m tests.extensions.replay.planted_replays OUT",),
    "needs a bad step: tests/extensions/replay/test_replay.py": ("ds-pretrain replay runs/gpt2@41203",),
    "takes minutes: tests/extensions/replay/test_replay_samples.py with -m slow": (
        "python -m tests.extensions.replay.planted_documents",),
    "takes a minute; tests/extensions/replay/test_flight_record.py records smaller runs": (
        "ds-pretrain --deepspeed_config zero1_bf16 --model gpt2 --model_overrides n_layer=8,n_embd=512,n_head=8,"
        "vocab_size=16384,n_positions=512,resid_pdrop=0,attn_pdrop=0,embd_pdrop=0 --train_data "
        "runs/quickstart/data/train --seq_length 512 --micro_batch_size 8 --train_steps 9 --save_interval 0 "
        "--save runs/record_cost",
        "head -n 1 runs/record_cost/flight/start_0/rank_0.jsonl")}
