"""The real supervisor, while reads of the run folder fail: `python -m tests.extensions.supervise.failing_reads FOLDER`.

See tests/support/failing_reads.py.
"""

import sys
from pathlib import Path

from pretrain.extensions.supervise.next_start import SupervisorSettings
from pretrain.extensions.supervise.supervisor import supervise
from tests.support.failing_reads import BEGAN, ROW, STOP, main


def supervised(run: Path) -> int:
    """The first start crashes at step 3, the second one finishes."""
    script = f"cd {run}; echo '{BEGAN}' >> events.jsonl; echo '{ROW}' >> metrics.jsonl; echo >> starts; " \
             f"[ $(wc -l < starts) -gt 1 ] || exit 9; echo '{STOP % 'finished'}' >> events.jsonl"
    hostfile = run / "hosts"
    hostfile.write_text("localhost slots=1\n")
    (run / "run.yaml").write_text("train_steps: 9\n")
    command = ["bash", "-c", script, "deepspeed", "--hostfile", str(hostfile), "train.py", "--config",
               str(run / "run.yaml")]
    return supervise(SupervisorSettings(command, run, hostfile, backoff_s=0.05, backoff_max_s=0.1, max_restarts=30,
                                        health_command="true"), lambda line: None)


if __name__ == "__main__":
    main(Path(sys.argv[1]), {"supervise": supervised})
