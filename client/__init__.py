"""The client SDK: pyzmq, msgpack and msgspec only."""
