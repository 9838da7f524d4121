"""`ds-pretrain reproduce`: train a recipe of published/, and compare the result with the published one."""
