"""Random faults for a run under the supervisor, compared with the same run without faults: `python -m tests.chaos`.

No module of the package knows of it: hooks/sitecustomize.py patches the ranks from outside.
"""
