"""The training loss compared with the expected curve of --expected_curve: departures, and their likely causes."""
