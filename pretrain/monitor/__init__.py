"""Reports of a run about itself: metrics rows, the progress line, MFU, and the files of the run folder.

Imports engine/, config/, data/, model/, terminal, distributed/ and errors; never checkpoint/, resilience/
or cluster/.
"""
