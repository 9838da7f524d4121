"""pretrain/cluster/hosts"""
