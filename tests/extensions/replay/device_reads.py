"""Reads of the flight recorder, allowed in unlogged steps: see tests/distributed/test_metrics.py."""

ALLOWED = ("extensions/replay/recorder.py:_crc", "extensions/replay/recorder.py:complete")
