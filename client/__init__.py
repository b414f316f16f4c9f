"""The Python SDK: `Client`, `AsyncClient` and what they return. Errors are in `llmrt.wire.errors`.

with Client() as client:
    print(client.generate("The capital of France is", max_tokens=8).text)
"""

from llmrt.client.blocking import Client
from llmrt.client.client import AsyncClient, Stream
from llmrt.client.results import Result, StreamEvent, TokenLogprob
from llmrt.wire.messages import ChatMessage

__all__ = [
    "AsyncClient",
    "ChatMessage",
    "Client",
    "Result",
    "Stream",
    "StreamEvent",
    "TokenLogprob",
]
