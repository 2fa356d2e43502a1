"""Tensors between the processes of a stage: frames over sockets, the handshake, and where workers listen."""
