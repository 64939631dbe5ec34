"""Fault injection into a real run, and a report of how the run recovered from each fault: `mh chaos`.

May import `spec`, `checkpoint`, `control`, `observe`, `launcher.worker_process` and `trials`.
Start reading at `chaos_run.play`.
"""
