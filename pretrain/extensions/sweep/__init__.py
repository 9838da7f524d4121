"""Search for the settings with the lowest validation loss, over many runs."""
