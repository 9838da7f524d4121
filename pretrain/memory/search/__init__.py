"""pretrain/memory/search"""
