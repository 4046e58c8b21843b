"""Other frameworks on murmura; each module imports its framework when it is used, not before."""
