"""What crosses a process: ids, messages, errors and their encoding."""
