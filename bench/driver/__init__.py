"""Runs the sides of a comparison in turn: processes, the driver that lets one of them run, and its clients.

`turns` is also loaded in the environments of other libraries: it, and this file, import the standard library only.
May import `results` and `programs.workloads`. Start reading at `baton.interleave`.
"""
