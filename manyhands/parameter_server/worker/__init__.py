"""The worker's side: how it reaches servers, weights and embedding rows."""
