"""One parameter server, without its sockets: messages in, messages out, and updates in between."""
