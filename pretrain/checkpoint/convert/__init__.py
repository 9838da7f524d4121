"""pretrain/checkpoint/convert"""
