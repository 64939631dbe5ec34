"""The write-ahead log of a server's updates, on disk or at a backup."""
