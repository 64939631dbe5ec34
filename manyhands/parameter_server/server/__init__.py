"""One parameter server, without its sockets: messages in, messages out, and updates in between.

May import `comm`, `checkpoint`, `parallel`, `parameter_server.protocol`, `parameter_server.memory`, `embedding`,
`parameter_server.log` and `parameter_server.tables`.
Start reading at `server.ParameterServerCore`.
"""
