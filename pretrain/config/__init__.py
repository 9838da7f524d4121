"""pretrain/config"""
