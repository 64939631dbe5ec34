"""The coordinator's process, its store and its log: the shell around the pure decisions of `control.membership`."""
