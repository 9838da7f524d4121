"""pretrain/memory/measure"""
