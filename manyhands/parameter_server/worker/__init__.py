"""The worker's side: how it reaches servers, weights and embedding rows.

May import `comm`, `parallel`, `parameter_server.protocol`, `parameter_server.memory`, `embedding`,
`parameter_server.tables` and `parameter_server.server`.
Start reading at `server_connection.ServerConnection`.
"""
