"""A discrete-event simulator around the live policy code, with bounds that say how far from the best it is."""
