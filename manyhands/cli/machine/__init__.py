"""Commands about this machine: its settings, health and keys."""
