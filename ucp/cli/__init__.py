"""The command line, one module a command. The only room that prints: stdout is data, stderr is talk."""
