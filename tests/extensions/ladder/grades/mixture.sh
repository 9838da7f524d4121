#!/usr/bin/env bash
# Grade a blend that `ds-pretrain ladder --mixtures` predicts: Python's library and Shakespeare. From a checkout's folder.
#
# The losses of the held-out blend are predicted, and written to runs/mixture/mixtures.json, before it is trained; the
# last command prints both. Given again, it skips finished parts.
set -euo pipefail
export DS_PRETRAIN_NEXT=0 OMP_NUM_THREADS=1
data=data/mixture
[[ -f $data/python/valid.jsonl ]] || ds-pretrain corpus $data/python --megabytes 4
# the text with a hash: its first 90% and its last 10%
[[ -f $data/shakespeare/valid.txt ]] || ds-pretrain reproduce shakespeare-char --scale small --out $data/shakespeare
prepare() { [[ -f $data/$2.idx ]] || ds-pretrain prepare "$data/$1" --tokenizer bytes --out "$data/$2"; }
prepare python/train.jsonl code
prepare python/valid.jsonl valid_code
prepare shakespeare/train.txt text
prepare shakespeare/valid.txt valid_text
ds-pretrain ladder --target tests/extensions/ladder/grades/mixture.yaml --mixtures 5 --out runs/mixture
