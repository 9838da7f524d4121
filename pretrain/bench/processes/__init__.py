"""pretrain/bench/processes"""
