"""pretrain/console"""
