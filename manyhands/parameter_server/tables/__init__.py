"""Embedding tables on servers, in memory that outlives a server.

May import `comm`, `parameter_server.protocol`, `parameter_server.memory` and `embedding`.
Start reading at `server_tables.ServerTables`.
"""
