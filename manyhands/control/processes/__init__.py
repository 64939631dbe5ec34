"""Processes of one host: started, fenced, watched, ended. What they are for is decided by `control.agent`."""
