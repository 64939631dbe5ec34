"""Other libraries' sides, each in a virtual environment of its own: `NAME.txt` pins it, `NAME_side.py` trains."""
