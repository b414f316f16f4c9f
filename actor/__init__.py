"""What every process has: the machine protocol, the ZMQ loop, supervision, logging."""
