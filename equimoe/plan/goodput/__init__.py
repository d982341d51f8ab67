"""How long a run takes with faults, saves, stragglers and planned stops, beside the plain plan."""
