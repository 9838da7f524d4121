"""Wrong paths by what is wrong with them: of files to read, and of files and folders to write."""

LONG = "n" * 300
STEP5 = "{world}/done/checkpoints/global_step5"
UNREADABLE = {"missing": "{world}/none", "folder": "{world}/nvme", "under a file": "{world}/file/x",
              "long": "{world}/" + LONG, "proc": "/proc/self/none"}
NO_FOLDER = {**UNREADABLE, "file": "{world}/file"}
UNWRITABLE = {"under a file": "{world}/file/x", "long": "{world}/" + LONG, "proc": "/proc/x",
              "proc below": "/proc/x/y"}
NO_FILE = {**UNWRITABLE, "no folder": "{world}/none/x"}
NO_NEW_FOLDER = {**UNWRITABLE, "file": "{world}/file"}
USED_FOLDER = {**NO_NEW_FOLDER, "other folder": "{world}/done"}
USED_FOLDER_OR_STEP = {**USED_FOLDER, "hf": "{world}/hf", "other step": "{world}/global_step3"}
NO_PREFIX = {**UNWRITABLE, "slash": "{world}/nvme/", "dot": ".", "dot dot": "..", "suffix": "x.bin"}
NO_DATA = {name: f"{{world}}/{name}" for name in ("none", "truncated", "corrupt", "lonely", "x.bin", "nvme/")}
ALL = {**UNREADABLE, **UNWRITABLE, "file": "{world}/file"}
IN_CHECKPOINT = "lies in the checkpoint"
NAME = "the last part of the path"  # instead of a text of the error; errors shorten long paths
