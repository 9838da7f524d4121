"""Commands of the pages that tests/test_quickstart.py does not run: see tests/support/pages.py."""

NOT_RUN_BECAUSE: dict[str, tuple[str, ...]] = {
    "needs an S3 server: tests/extensions/object_stores/test_text_files.py": (
        'ds-pretrain prepare "s3://bucket/corpus/*.jsonl.gz" --tokenizer data/tokenizer --out data/from_s3',),
    "needs an S3 server: tests/extensions/object_stores/test_run.py trains from one": (
        "ds-pretrain --num_accelerators 2 --deepspeed_config zero2_bf16 --model tiny --train_data "
        "s3://bucket/corpora/corpus --tokenizer data/tokenizer --seq_length 128 --micro_batch_size 4 --train_steps "
        "100 --save runs/store",)}
