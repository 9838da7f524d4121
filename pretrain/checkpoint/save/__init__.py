"""pretrain/checkpoint/save"""
