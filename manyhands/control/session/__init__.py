"""Connections to an agent: those of its workers and servers, and those of `mh status`, `mh stop` and `mh scale`.

May import `spec`, `comm`, `control.messages`, `control.run_directory`, `control.membership` and `control.coordinator`.
Start reading at `session.Session`.
"""
