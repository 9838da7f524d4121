"""pretrain/bench/baselines"""
