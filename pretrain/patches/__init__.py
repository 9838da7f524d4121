"""pretrain/patches"""
