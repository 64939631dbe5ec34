"""Short runs of the user's script that answer a question: `mh tune`, `mh check`."""
