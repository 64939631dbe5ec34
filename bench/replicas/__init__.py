"""Whole replicas on one host, beside one process by hand, DDP, Gloo and other libraries; and their memory.

May import `driver`, `results` and `programs`. Start reading at `ddp.measure`.
"""
