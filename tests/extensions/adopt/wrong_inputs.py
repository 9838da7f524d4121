"""Wrong command lines of `import` with a run of another program: see tests/wrong_inputs/commands.py."""

from tests.wrong_inputs.paths import NAME, USED_FOLDER_OR_STEP

_FOREIGN = {"global_step5/mp_rank_00_model_states.pt": b"nonsense"}
PATHS = [(("import",), "{world}/hf --save PATH", USED_FOLDER_OR_STEP, NAME)]
LINES: list[tuple[str, str, str, dict[str, bytes]]] = [
    ("import", words, culprit, _FOREIGN) for words, culprit in (
        ("{world}/hf", "--save --output"), ("RIGHT --step 7", "--step: it has no effect: --output imports weights"),
        ("{world}/hf --save {world}/out --step 7", "--step: it has no effect: {world}/hf has weights alone"),
        ("{world}/hf --save {world}/out --accept_without rng", "--accept_without: it has no effect"),
        ("{world}/hf --save {world}/done", "done: the folder exists"),
        ("{world}/done --save {world}/out", "--resume_from"),
        ("{world}/nvme --save {world}/out", "nvme: it holds no checkpoint that is recognized (it has no files)"),
        ("{world}/none --save {world}/out", "none: there is no such folder"),
        ("{world} --save {world}/out --step 7", "no checkpoint of this step. It has those of the steps 5"),
        ("{world} --save {world}/done", "done: the folder exists"),
        ("{world} --save {world}/global_step3", "--save: {world}/global_step3 names a checkpoint"),
        ("{world} --save {world}/out --accept_without rgn", 'Did you mean "rng"?'),
        ("{world} --save {world}/out --accept_without rng,", "--accept_without: found an empty name"),
        ("{world} --save {world}/out --model {world}/none", "none"))]
