"""The write-ahead log of a server's updates, on disk or at a backup.

May import `comm`, `checkpoint` and `parameter_server.protocol`.
Start reading at `write_ahead_log.WriteAheadLog`.
"""
