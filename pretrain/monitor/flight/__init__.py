"""The flight recorder: what each rank computed in each of its last steps, in the order in which it was computed.

- `digest.py`: the keys of a rank's row for one step, by the stage of the step that they show.
- `record_files.py`: the files of these rows in the run folder.
- `recorder.py`: takes the digests while the run trains; `interval.py`: in which steps those that read much memory.
- `begin.py`: the beginning of a start's record.
"""
