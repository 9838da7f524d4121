"""pretrain/config/ds_json"""
