"""pretrain/checkpoint/format"""
