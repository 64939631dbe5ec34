"""The command line: one thin file per command, in a folder per purpose. Each parses, calls the library and prints.

May import `spec` and `cli.common`.
Start reading at `main.main`.
"""
