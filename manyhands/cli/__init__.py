"""The command line: one thin file per command. Each parses, calls the library and prints."""
