"""pretrain/cluster/supervise"""
