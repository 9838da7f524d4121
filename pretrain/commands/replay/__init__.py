"""`ds-pretrain replay`: train the steps before a step again, and say why the step was as it was.

- `main.py`: the command.
- `launch.py`: the files and the command of a replay, and its ranks.
- `output.py`: the lines of a verdict.
"""
