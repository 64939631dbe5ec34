"""Whole trainings that a user can start by name: `mh run --recipe NAME`. Each is a module to run."""

RECIPES = {
    "digits": "handwritten digits, by a small convolutional network",
    "recommender": "clicks, by a wide and deep model with embeddings; on data that it makes, or on yours",
}
