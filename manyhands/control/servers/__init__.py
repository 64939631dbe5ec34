"""This host's parameter server processes, the spare server, and the backup of other hosts' logs.

May import `spec`, `comm`, `parameter_server.log`, `control.messages`, `control.security`, `control.membership`,
`control.coordinator` and `control.processes`.
Start reading at `server_processes.HostServers`.
"""
