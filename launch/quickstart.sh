#!/usr/bin/env bash
# Train a small model on a fresh machine: environment, corpus, tokenizer, training, summary, generated text.
#
#   launch/quickstart.sh [RUN_FOLDER]     (default: runs/quickstart)
#
# SETUP=done: skip launch/setup.sh and use the environment VENV.
# The corpus is the source code of Python's standard library (11 to 30 MB), so nothing is downloaded for it.
# The script can be run again: it skips finished parts. The training resumes, or reports that it is complete.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
run=$(realpath -m "${1:-$here/runs/quickstart}")
cd "$here"
start=$SECONDS
[ "${SETUP:-}" = done ] || launch/setup.sh
VENV=${VENV:-$here/.venv}
export PATH="$VENV/bin:$PATH"
say() { printf '\033[1m[quickstart] %s\033[0m\n' "$*"; }

gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
case ${gpus:-0} in
    0) ranks=2 config=ds_configs/pipeline2_zero1_bf16.json device="the CPU" ;;
    1) ranks=1 config=ds_configs/zero1_bf16.json device="one GPU" ;;
    *) ranks=2 config=ds_configs/pipeline2_zero1_bf16.json device="two GPUs" ;;
esac

mkdir -p "$run"
if [ ! -e "$run/corpus/valid.jsonl" ]; then
    say "corpus: the standard library's source files"
    ds-pretrain corpus "$run/corpus"
fi
if [ ! -e "$run/tokenizer/tokenizer.model" ]; then
    say "tokenizer: SentencePiece, 4096 pieces"
    ds-pretrain tokenizer "$run/corpus/train.jsonl" --out "$run/tokenizer" --vocab_size 4096
fi
for split in train valid; do
    if [ ! -e "$run/data/$split.idx" ]; then
        say "tokens: $split"
        ds-pretrain prepare "$run/corpus/$split.jsonl" --tokenizer "$run/tokenizer" --out "$run/data/$split"
    fi
done

say "training on $device: $ranks ranks, $config"
ds-pretrain --num_accelerators "$ranks" \
    --config launch/quickstart.yaml --deepspeed_config "$config" --train_data "$run/data/train" \
    --valid_data "$run/data/valid" --tokenizer "$run/tokenizer" --save "$run"

say "result"
ds-pretrain summary "$run" --below_unigram_entropy
say "a sample"
ds-pretrain generate "$run" --prompt 'def read_' --max_new_tokens 120 --seed 1

q=$(printf %q "$run")  # quoted, for commands that are copied from the text below
cat <<END

Done in $((SECONDS - start)) s. All files are in $run:
  corpus/ tokenizer/ data/      text, SentencePiece model, tokens (.bin and .idx)
  checkpoints/                  DeepSpeed's sharded checkpoints
  metrics.jsonl events.jsonl    losses and events of the run
  run.json                      settings, versions and data of the run
Next:
  ds-pretrain generate $q --prompt 'class Parser:'
  ds-pretrain check --world_size 8 --deepspeed_config ds_configs/zero3_bf16.json --model gpt2 --model_overrides vocab_size=4096 --train_data $q/data/train --tokenizer $q/tokenizer --train_steps 1000 --save runs/gpt2
  ds-pretrain --num_accelerators $ranks --config launch/quickstart.yaml --deepspeed_config $config --train_data $q/data/train --valid_data $q/data/valid --tokenizer $q/tokenizer --save $q --train_steps 500
  ds-pretrain evaluate $q
  ds-pretrain export $q --output $q-hf
(Activate the environment first: source $(printf %q "$VENV")/bin/activate)
END
