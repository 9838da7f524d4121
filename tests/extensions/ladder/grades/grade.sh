#!/usr/bin/env bash
# Grade a prediction of `ds-pretrain ladder`: tests/extensions/ladder/grades/grade.sh CORPUS [FOLDER]
#
# CORPUS is python, the source code of Python's library, or gcide, the dictionary of the Debian package dict-gcide
# 0.48.5+nmu2, which apt-get downloads. The predictions are written before the target is trained; the last commands print
# predictions and results. Takes an hour or more. Given again, it skips finished parts.
set -euo pipefail
corpus=$1 folder=${2:-runs/grade-$1}
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$folder/data"
cp "$here"/{run.yaml,config.json,deepspeed.json} "$folder"
cd "$folder"

case $corpus in
    python)
        ds-pretrain corpus data
        train=data/train.jsonl valid=data/valid.jsonl ;;
    gcide)
        [[ -f dict-gcide_0.48.5+nmu2_all.deb ]] || apt-get download dict-gcide=0.48.5+nmu2
        echo "7b0af5cfde3cbdef5e9d6e78f92ec335ced7c2790f37a40f49bebc6f7347ac0f  dict-gcide_0.48.5+nmu2_all.deb" | sha256sum --check
        dpkg-deb -x dict-gcide_0.48.5+nmu2_all.deb .
        train=data/train_text valid=data/valid_text
        mkdir -p $train $valid
        # documents of 400 lines; one of 30 is for validation
        zcat < usr/share/dictd/gcide.dict.dz | iconv -f latin1 -t utf-8 | awk -v train=$train -v valid=$valid '{
            part = int(NR / 400); file = (part % 30 ? train : valid) "/" part ".txt"
            if (file != last) close(last)
            last = file; print > file }' ;;
    *) echo "usage: $0 python|gcide [FOLDER]" >&2; exit 2 ;;
esac
[[ -f data/train.idx ]] || ds-pretrain prepare "$train" --tokenizer data/tokenizer --vocab_size 1024 --out data/train
[[ -f data/valid.idx ]] || ds-pretrain prepare "$valid" --tokenizer data/tokenizer --out data/valid

# the target with half of the tokens: a run that branches off the target's stable phase
sed 's/^train_steps: 800/train_steps: 400/; s/^save: run$/save: run-400/' run.yaml > run-400.yaml
ladder() { ds-pretrain ladder --target "$1" --budget 2h --parameters 0.2M,0.4M,0.65M,1.3M,3.2M --tokens 820k --out ladder; }
for target in run run-400; do
    ladder $target.yaml
    cp ladder/ladder.json $target.json
done
sha256sum run.json run-400.json
ds-pretrain --num_accelerators 1 --config run.yaml
ds-pretrain --num_accelerators 1 --config run.yaml --save run-400 --train_steps 400 --lr_wsd_steps 80 --eval_interval 0 \
    --resume_from run@320 --override schedule
ladder run-400.yaml
ladder run.yaml
