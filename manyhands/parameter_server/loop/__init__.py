"""`fit`, a user loop and the server's process, where weights are on servers."""
