"""Local SGD and related methods: when workers average, what they average, and by which rule."""
