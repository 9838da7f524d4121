"""Shell scripts that start a training: `translate` reads the words that bash gives to the program, and runs nothing."""

import os
import random
import subprocess
from pathlib import Path

import pytest

from pretrain.errors import ConfigError
from pretrain.extensions.translate.main import main
from pretrain.extensions.translate.read_input import read_settings, script_words
from pretrain.extensions.translate.settings import WrittenFile

# forms of public scripts of Megatron-DeepSpeed and BigScience, in texts of our own
SCRIPTS = {
    "variables": """
        LAYERS=4; HEADS="8"  # comments, "quotes' in them
        export WIDTH=$((HEADS * 32)) SEQ='64'
        ARGS=" --num-layers $LAYERS --hidden-size ${WIDTH} \\
            --seq-length $SEQ "
        ARGS+="--fp16"
        CUDA_VISIBLE_DEVICES=0,1 deepspeed --num_gpus 2 pretrain_gpt.py $ARGS --split '9,1,0' "--tag=a b" &> log.txt""",
    "command in a variable": """
        LAUNCHER="python -u -m torch.distributed.run --nproc_per_node 4"
        export CMD=" `pwd`/pretrain_gpt.py --method 'type:a|b' \\
            --lr 1e-4 "
        echo $CMD
        clear; srun --wait=60 bash -c "$LAUNCHER --node_rank \\$SLURM_PROCID $CMD" 2>&1 | tee -a log.txt""",
    "in single quotes": """
        export LAUNCHER="python -m torch.distributed.launch" CMD="pretrain_gpt.py --lr 1e-4 --name 'x y'"
        srun --jobid 5 bash -c '$LAUNCHER --node_rank 0 $CMD' > out.txt""",
    "eval": """
        run_cmd="deepspeed pretrain_gpt.py --name 'x y' --lr 2e-4"
        echo ${run_cmd}
        eval ${run_cmd}
        set +x""",
    "conditions": """
        SIZE=18; STAGE=1; EMPTY=""
        if   [[ ${SIZE} == 7 ]];    then H=1;  L=2
        elif [[ ${SIZE} == 1* && $STAGE -gt 0 ]]; then H=3; L=4
        elif [ $SIZE = 18 ]; then H=5
        else H=7
        fi
        if [ -z "$EMPTY" ] && [ "$STAGE" -le 1 ]; then Z="--zero"; fi
        if ! [ "$Z" = "" ] || false
        then
          if (( SIZE % 4 == 2 )); then EXTRA="--odd"; else EXTRA="--even"; fi
        fi
        [[ $SIZE -lt 10 ]] && EXTRA="--small"
        [ "$STAGE" = 1 ] || EXTRA="--none"
        deepspeed pretrain_gpt.py --h $H --l $L $Z $EXTRA""",
    "defaults": """
        A=${1:-3}; B=${UNSET_NAME:-"4 5"}; C=${A:+yes}; D=${OTHER:-${A}}
        : ${E:=6}
        deepspeed pretrain_gpt.py --a $A --b $B --c "$C" --d $D""",
    "arrays": """
        ARGS=(
          --num-layers 2   # a comment "
          --name "x y"
        )
        ARGS+=(--lr 1e-3); MORE=(--a 1)
        torchrun --nproc_per_node=8 pretrain_gpt.py "${ARGS[@]}" ${MORE[@]} ${MORE[1]}""",
    "arithmetic": """
        T=300; N=$(( ${T} * 1000 / (7 - 5) )); M=$((N % 7)); NEG=$((-7 / 2))
        deepspeed pretrain_gpt.py --n $N --m $M --neg=$NEG --k $(( N > 5 ))""",
    "here-document": """
        STAGE=2; config="./ds_config.json"
        cat <<EOT > $config
        {"train_micro_batch_size_per_gpu": $STAGE, "zero_optimization": {"stage": ${STAGE}},
         "gradient_clipping": 1.0, "steps_per_print": $((5 * 2))}
EOT
        deepspeed pretrain_gpt.py --deepspeed_config ${config} --zero-stage $STAGE""",
    "literal here-document": """
        cat > ds.json <<'EOT'
        {"steps_per_print": 1, "comment": "$HOME `x` \\n"}
EOT
        deepspeed pretrain_gpt.py --deepspeed_config ds.json""",
    "sed": """
        BATCH=8; template=template.json
        sed "s/BATCH/${BATCH}/" ${template} | sed -e "s/STAGE/1/g" \\
            | sed "s#PATH_HERE#a\\/b#" \\
            > ds.json
        deepspeed pretrain_gpt.py --deepspeed_config ds.json""",
    "loops that do not start": """
        while [[ $# -gt 0 ]]
        do
        key="$1"
        case $key in
            -z|--zero) STAGE="$2"; shift ;;
            *) shift ;;
        esac
        done
        echo "{}" > ds.json
        deepspeed pretrain_gpt.py --stage ${STAGE:-1} --deepspeed_config ds.json""",
}
TEMPLATE = '{"train_batch_size": BATCH, "zero_optimization": {"stage": STAGE}, "name": "PATH_HERE"}\n'
# stands in for python, deepspeed and torchrun: writes its arguments, and the JSON that they name
STUB = """#!/bin/bash
printf '%s\\n' "$@" > words
while [ $# -gt 1 ]; do [ "$1" = --deepspeed_config ] && cat "$2" > json; shift; done; true
"""
SRUN = '#!/bin/bash\nwhile [[ $1 == -* ]]; do [[ $1 == --jobid ]] && shift; shift; done\nexec "$@"\n'


@pytest.fixture
def in_bash(tmp_path: Path) -> Path:
    """Return a folder with a template, and with programs in bin/ that record their arguments."""
    (tmp_path / "bin").mkdir()
    for name in ("python", "deepspeed", "torchrun", "srun", "clear"):
        (tmp_path / "bin" / name).write_text(SRUN if name == "srun" else STUB if name != "clear" else "#!/bin/bash\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "template.json").write_text(TEMPLATE)
    return tmp_path


@pytest.mark.parametrize("name", SCRIPTS)
def test_words_and_json_are_those_of_bash(name: str, in_bash: Path) -> None:
    text = SCRIPTS[name].replace("\n        ", "\n").lstrip("\n")
    script = in_bash / "train.sh"
    script.write_text(text)
    path = f"{in_bash}/bin:{os.environ['PATH']}"
    subprocess.run(["bash", "train.sh"], cwd=in_bash, check=True, capture_output=True,
                   env={"PATH": path, "SLURM_PROCID": "$SLURM_PROCID"})
    expected = (in_bash / "words").read_text().replace(str(in_bash), "$PWD").splitlines()
    written: dict[str, WrittenFile] = {}
    notes: list[str] = []
    found = script_words(str(script), text, notes, written)
    program = next(index for index, word in enumerate(found) if word.endswith(".py"))
    at = next(index for index, word in enumerate(expected) if word.endswith(".py"))
    assert (found[program:], notes) == (expected[at:], [])
    assert found[program - at:program] == expected[:at]
    if (in_bash / "json").exists():
        assert written[found[found.index("--deepspeed_config") + 1]].text == (in_bash / "json").read_text()


HALF = """#!/bin/bash
GPUS=$(nvidia-smi -L | wc -l)
NOW=`date`
if [ -f /data/x.idx ]; then
  DATA=/data/x
else
  DATA=/data/y
fi
for size in 1 2; do
  LR=${size}e-4
done
sed "s/[A-Z]*/x/" template.json > ds.json
python tools/preprocess_data.py --input x
for i in 1; do ssh host$i; done
deepspeed --num_gpus $GPUS pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 \\
    --max-position-embeddings 64 --vocab-size 512 --micro-batch-size 1 --train-iters 100 --lr LEARNING_RATE \\
    --data-path $DATA --tensorboard-dir runs/$NOW --deepspeed_config ds.json --exit-duration-in-mins 30000000
"""


def test_lines_that_were_not_understood_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines that decide a setting are named; lines that decide only the launcher's flags are not."""
    script = tmp_path / "train.sh"
    script.write_text(HALF.replace("LEARNING_RATE", "3e-4"))
    main([str(script), "--output", str(tmp_path / "out")])
    lines = [line for line in capsys.readouterr().out.splitlines() if " was not understood" in line]
    assert [line.removeprefix("remains to do: ").strip() for line in lines] == [
        'train.sh: line 12 was not understood: sed "s/[A-Z]*/x/" template.json > ds.json (what it writes is not known)',
        "train.sh: line 3 was not understood: NOW=`date`",
        "train.sh: line 4 was not understood: if [ -f /data/x.idx ] (taken as true)"]
    yaml = (tmp_path / "out/run.yaml").read_text()
    assert "train_data: /data/x\n" in yaml
    assert "what the script writes into ds.json is not known" in yaml
    script.write_text(HALF.replace("LEARNING_RATE", "$LR"))
    with pytest.raises(ConfigError, match=r"train.sh: --lr: found \$LR; expected a number"):  # in a loop
        main([str(script), "--output", str(tmp_path / "other")])


def test_nothing_of_a_script_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.sh"
    script.write_text("""touch made; A=$(touch made); B=`touch made`; cat > made <<E
x
E
eval "touch made"; bash -c 'touch made'; : ${C:=$(touch made)} $((1 + $(touch made)))
sed s/a/b/ pipe > ds.json; cat /dev/zero > zeros.json
deepspeed pretrain_gpt.py --num-layers $(touch made) --name "$(touch made)" > made
""")
    os.mkfifo("pipe")  # reading it would wait for a writer
    before = sorted(os.listdir())
    settings = read_settings(["train.sh"], [], None)
    assert (settings.given, sorted(os.listdir())) == ({"num_layers": "$(...)", "name": "$(...)"}, before)


PIECES = ("", "$", "${", "$(", "((", "'", '"', "`", "\n", "[[ ", "]]", "<<", ";", "|", "done", "fi", "then ", "else",
          "\\", "${A[@]", "a=(")


def test_damaged_scripts_are_read_or_rejected_in_one_line(tmp_path: Path) -> None:
    chance, rejected, script = random.Random(45), 0, str(tmp_path / "a.sh")
    for _script in range(400):
        text = SCRIPTS[chance.choice([*SCRIPTS])]
        for _ in range(chance.randint(1, 4)):
            at, length = chance.randrange(len(text)), chance.choice((0, 1, 1, 9))
            text = text[:at] + chance.choice(PIECES) + text[at + length:]
        try:
            script_words(script, text, [], {})
        except ConfigError:
            rejected += 1
    assert 20 < rejected < 380


@pytest.mark.parametrize(("text", "line"), [
    ("A=aaaaaaaaaaaaaaaa\n" + "A=$A$A$A$A$A$A$A$A\n" * 30 + "deepspeed x.py --a $A", "too large for a script"),
    ("if x; then\n" * 90, "nested too deeply"), ("[ " + "! " * 1200 + "x ]", "nested too deeply"),
    ("A=" + "$((" * 5000, "line 1: it is not a list of words"),
    ("[[ a " * 200_000, "line 1: it is not a list of words"),
    ("deepspeed a.py --n $((" + "9**" * 50 + "9))", "--from"),
    ("x='\n\ny", "line 1: it is not a list of words"),
    ("bash -c '" * 3 + "\n", "line 1"),
    ("A='eval $A'\n$A --x\neval $A --num-layers 2", "found|no setting|--from|no program"),
    ("deepspeed pretrain_gpt.py --lr 1\nif true; then deepspeed pretrain_gpt.py --lr 2; fi", "on the lines 1, 2"),
    ("export A=1\nsbatch --nodes 2 train_all.sh $A", "line 2 starts another script: sbatch --nodes 2 train_all.sh 1"),
    ("ls", "it starts no program with arguments"),
    ("python pretrain_prefix_lm.py --num-layers 2", "no GPT-style model"),
    ("deepspeed finetune_t0.py --num-layers 2", "finetune_t0.py trains no GPT-style model"),
])
def test_scripts_that_cannot_be_read_give_one_line(text: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text(text)
    with pytest.raises(ConfigError, match=line):
        main([str(tmp_path / "a.sh"), "--output", str(tmp_path / "out")])
