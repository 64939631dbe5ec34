"""From a command line or a script to a running agent. Imports no torch.

May import `native`, `spec`, `comm`, `control`, `observe` and `launcher.worker_process`.
Start reading at `launch.launch_command`.
"""
