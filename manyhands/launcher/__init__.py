"""From a command line or a script to a running agent. Imports no torch.

May import `native`, `spec`, `comm`, `control`, `observe`, `launcher.worker_process`, `launcher.machine` and
`launcher.placers`.
Start reading at `launch.launch_command`.
"""
