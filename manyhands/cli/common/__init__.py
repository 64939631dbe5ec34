"""Shared by several commands: options for settings, JSON output, hints for misplaced flags."""
