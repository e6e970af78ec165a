"""One file a runtime: from an engine file to a session, arrays in, arrays out."""
