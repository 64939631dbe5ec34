"""Local SGD and related methods: when workers average, what they average, and by which rule.

May import `comm`.
Start reading at `rounds.Rounds`.
"""
