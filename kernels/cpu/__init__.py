"""The compiled CPU step: C sources, and what Python calls them through."""
