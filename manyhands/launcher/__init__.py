"""From a command line or a script to a running agent. Imports no torch."""
