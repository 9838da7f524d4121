"""A replay trains some steps of a run again, and compares them with what the flight recorder of the run wrote.

- `target.py`: the start that trained the step, the checkpoint to begin with, and the data position.
- `compare.py`: the first difference between two recordings of the same steps.
- `samples.py`: the samples of a reproducible step that stand out; `sample_passes.py`: the passes over samples.
- `documents.py`: the documents of these samples, and what is odd about them.
- `result.py`: the result, from the differences between the run and its replays, and between the replays.
"""
