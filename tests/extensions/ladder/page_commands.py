"""Commands of the pages that tests/test_quickstart.py does not run, and why."""

_GRADES = "tests/extensions/ladder/grades"
NOT_RUN_BECAUSE = {
    "needs the network: published points": (
        "git clone https://github.com/epoch-research/analyzing-chinchilla",
        "awk -F, 'BEGIN {print \"run,parameters,tokens,loss\"} NR > 1 && $7 && $7 < 3.43 {printf "
        "\"p%d,%s,%.8g,%s\\n\", NR, $4, $5 / 6 / $4, $7}' analyzing-chinchilla/data/svg_extracted_data.csv "
        "> points.csv",
        "ds-pretrain ladder --points points.csv",
        "CHINCHILLA_POINTS=$PWD/points.csv pytest tests/extensions/ladder"),
    "takes an hour; tests/extensions/ladder/test_ladder.py trains smaller ones": (
        f"{_GRADES}/grade.sh python", f"{_GRADES}/grade.sh gcide", f"{_GRADES}/mixture.sh",
        "ds-pretrain ladder --target run.yaml --budget 2h",
        "ds-pretrain ladder --target run.yaml --budget 2h --gpu h100 --world_size 64",
        "ds-pretrain --num_gpus 8 --config run.yaml --expected_curve runs/ladder/ladder.json"),
}
