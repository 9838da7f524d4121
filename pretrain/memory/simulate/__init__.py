"""pretrain/memory/simulate"""
