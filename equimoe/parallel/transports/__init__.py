"""How tokens reach their experts and come back: on one device, in waves, or row by row."""
