"""How the commands of pages differ in the tests: see tests/support/pages.py."""

_SMALL_RUN = "--model_overrides vocab_size=4096,n_layer=2,n_embd=64,n_head=2 --seq_length 64 --micro_batch_size 2"
SMALLER = {
    "ds-pretrain sanity": f"ds-pretrain sanity {_SMALL_RUN}",
    "ds-pretrain find-lr": f"ds-pretrain find-lr {_SMALL_RUN}", "--to 1 --steps 100": "--to 1 --steps 30"}
NOT_PRINTED = {"ds-pretrain sanity [": "its usage"}
