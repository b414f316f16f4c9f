"""`llmrt bench`: a cluster under a load that can be repeated, beside what its memory allows."""
