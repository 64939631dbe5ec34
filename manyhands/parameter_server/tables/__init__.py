"""Embedding tables on servers, in memory that outlives a server."""
