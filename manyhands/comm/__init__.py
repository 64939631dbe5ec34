"""Ranks and processes talking: collectives, the store they meet through, and messages over ZeroMQ."""
