"""What the curve of a run shows: the curve and its statistics, the rules, and the new hints of a running process."""
