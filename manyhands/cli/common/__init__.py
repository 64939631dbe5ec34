"""Shared by several commands: options for settings, JSON output, hints for misplaced flags.

May import `spec`, `control.messages`, `observe` and `launcher`.
Start reading at `setting_options.settings_options`.
"""
