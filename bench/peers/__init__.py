"""The sides of other libraries, each in its own virtual environment: `NAME.txt` pins it, `NAME_side.py` trains."""
