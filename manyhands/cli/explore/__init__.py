"""Commands that examine a script by short runs: settings, layouts, memory."""
