"""`llmrt bench quality`: what each format of weights and KV cache costs on a fixed text."""
