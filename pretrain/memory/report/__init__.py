"""pretrain/memory/report"""
