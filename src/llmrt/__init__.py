"""llmrt: serve large language models on bare metal, colocated or split."""

__version__ = "0.1.0"
