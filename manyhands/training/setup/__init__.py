"""From what the user gave to an engine that trains it."""
