"""What keeps a run alive, or ends it in good order."""
