"""The kinds of data that a user can pass, each as a source of rows, of a stream, or of data per slice.

May import `data`.
Start reading at `as_source.as_source`.
"""
