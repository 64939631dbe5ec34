"""The coordinator's process, its store and its log: the shell around the pure decisions of `control.membership`.

May import `comm`, `control.line_log`, `control.messages`, `control.security` and `control.membership`.
Start reading at `process.Coordinator`.
"""
