"""Random faults for a run under the supervisor, compared with the same run without faults.

The program is `python -m tests.extensions.supervise.chaos`.

No module of the package knows of it: hooks/sitecustomize.py patches the ranks from outside.
"""
