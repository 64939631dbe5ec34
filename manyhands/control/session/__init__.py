"""Connections to an agent: those of its workers and servers, and those of `mh status`, `mh stop` and `mh scale`."""
