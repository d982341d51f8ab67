"""The command line, one thin file per help panel."""
