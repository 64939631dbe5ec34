"""Processes of one host: started, fenced, watched, ended. What they are for is decided by `control.agent`.

May import `spec`, `control.messages`, `control.membership` and `control.coordinator`.
Start reading at `worker_process.WorkerProcess`.
"""
