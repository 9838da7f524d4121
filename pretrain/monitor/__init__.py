"""What a run reports: the files of its folder, the progress line, FLOPs and MFU."""
