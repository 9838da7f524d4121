"""Wrong values of the flags: see tests/wrong_inputs/inputs.py."""

from typing import Any

WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    *(({"pipeline": {"stages": 2}}, {"world_size": 2, "pipeline_timeline": steps}, "--pipeline_timeline: found")
      for steps in ("5:3", "0:2", "x", "49:51")),
    ({}, {"pipeline_timeline": "3"}, "--pipeline_timeline: found a run with one pipeline stage"),
    *(({}, {"profile_steps": steps}, "--profile_steps") for steps in ("5:3", "0:2", "3:", "1:200", "49:51", "x", "-1")),
    *(({}, {"profile_ranks": ranks}, "--profile_ranks") for ranks in ("9", "0,", "none", "-1")),
    ({}, {"memory_snapshot": True}, "a run on cuda"),
]
