"""pretrain/distributed"""
