"""pretrain/model/kernels"""
