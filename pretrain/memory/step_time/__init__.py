"""pretrain/memory/step_time"""
