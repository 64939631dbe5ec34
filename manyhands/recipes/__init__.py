"""Complete training programs to start by name: `mh run --recipe NAME`. Each is a module to run.

May import `spec`, `comm` and `strategies`.
Start reading at `digits.main`.
"""

RECIPES = {
    "digits": "handwritten digits, with a small convolutional network",
    "recommender": "clicks, with a wide and deep model with embeddings; on synthetic data, or on yours",
}
