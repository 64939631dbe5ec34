"""Side-by-side measurements against named peers: `python -m bench`. How to read them: docs/benchmarks.md."""
