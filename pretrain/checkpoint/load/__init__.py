"""pretrain/checkpoint/load"""
