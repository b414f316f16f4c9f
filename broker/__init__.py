"""Routes requests to workers; all of its state is soft."""
