"""`ds-pretrain ladder`: train smaller models, fit a scaling law, and predict the loss of a larger run."""
