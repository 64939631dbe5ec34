"""The messages that replicas exchange in every step, straggler detection, and checks that their copies are equal."""
