"""The page with the curves of runs: `ds-pretrain report`."""
