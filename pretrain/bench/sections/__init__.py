"""pretrain/bench/sections"""
