"""pretrain/analysis"""
