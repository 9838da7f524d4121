"""pretrain/memory/estimate"""
