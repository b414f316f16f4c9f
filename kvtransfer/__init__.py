"""The hand-over of KV blocks: ledger, arenas and transports."""
