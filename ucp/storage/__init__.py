"""Where the bytes of files are: local file systems and object stores, behind the protocol `Storage`."""
