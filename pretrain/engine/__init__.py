"""pretrain/engine"""
