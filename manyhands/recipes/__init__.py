"""Whole trainings that a user can start by name; each is also a script to copy from."""
