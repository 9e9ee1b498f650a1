"""The command line: one module per command. Only this room prints: data to stdout, messages to stderr."""
